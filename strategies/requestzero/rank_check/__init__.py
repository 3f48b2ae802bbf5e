"""Agreement of data-parallel ranks on what they are about to do, so that none waits for another in vain.

Every rank *states* what comes next (begin a request of so many micro-batches, step, end of its data, ...): a few
integers, brought together by one small all-reduce on a process group of its own, which can run beside a forward. What
was announced is not stated again; a rank that leaves what was announced states that, whatever it is. If all ranks state
the same they go on, so that a change on all ranks together is allowed. If not, all of them raise the same error.

A rank that states something while others wait in a gradient reduction would wait for ever, and so would they. Waits
are therefore *watched*: where all ranks wait, for different things, nothing can move any more, and they say so to each
other by way of the process group's store. A rank that computes waits for nothing, and is waited for.

Read in this order: ``statement`` (what is stated), ``channel`` (the process group), ``board`` (the store), ``watch``
(waits, and the error), ``schedule`` (the order of reduction), ``agreement`` (the life of a request), ``communication``
(DeepSpeed's reductions, watched).
"""

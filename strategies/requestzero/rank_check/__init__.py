"""Check that the data-parallel ranks do the same next, so that none waits for another in vain.

Every rank has an *intent*: it begins a request of so many micro-batches, steps, has no more data, and so on. The ranks
compare their intents, a few integers each, with one small all-reduce on a process group of their own, which runs
beside the forward. What was announced before needs no comparison of its own; a rank that departs from it compares that.
Ranks with the same intent go on, so that a change on all ranks together is allowed. Otherwise all of them raise the
same error.

A rank that compares while the others wait in a gradient reduction would wait for ever, and so would they. Waits are
therefore *watched*: a rank that has waited for a second puts a report into a mailbox of the process group's store.
Where all ranks wait, for different things, none can go on, and all of them raise. A rank that computes is never taken
for stuck, nor is one that the machine does not serve.

Read in this order: ``intent``, ``channel`` (compares intents), ``rank_report`` and ``mailbox`` (for ranks that wait),
``standstill`` (all of them do), ``watch`` (waits that end in an error), ``message`` (its text), ``comparison``,
``reduction_order``, ``request`` and ``progress`` (how far a rank has come), ``interface`` (what an engine calls, and
what that does for a rank alone), ``agreement`` (what it does among several ranks), ``communication`` (DeepSpeed's
reductions, watched).
"""

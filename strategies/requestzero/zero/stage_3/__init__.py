"""The request-safe ZeRO-3 optimizer.

DeepSpeed's flat gradient buffer is the running sum of a window already: it is allocated once, in the accumulation
dtype, and stays. What is added here is which parameters have taken part. Read in this order: ``layout`` (the buffer's
shards), ``shard_sums`` (the sum), ``host_gradients`` (what an offloaded step reads), ``reduction`` (DeepSpeed's
buckets, agreed on by the ranks), ``gathers`` (its all-gathers, watched), ``gradient_access`` (what users read and
write), ``optimizer_parts`` and ``optimizer`` (the subclass of DeepSpeed's).
"""

"""Faults, injected into short trainings of two CPU ranks: what happens then, and if the run can be resumed.

``python -m requestzero.faults`` draws combinations of a front end, a point, a fault and a rank, runs each of them with
real processes, and compares what it finds with what must hold: no rank hangs, all ranks end with the same first error,
nothing is half applied, and the run that is resumed from the last checkpoint equals the uninterrupted one, bit for bit.

Read in this order: ``combination``, ``setup`` and ``drawing`` (what is injected into which training), ``injection``
and ``damage`` (on a rank), ``training`` (the front ends), ``places`` and ``journal`` (what a rank leaves behind),
``ranks`` (processes), ``references`` (runs to compare with), ``expectation`` (what must hold), ``trial`` (one
combination), ``run`` (all of them), ``table``.
"""

"""The planner of the FlexGen paper (Sheng et al., ICML 2023) as it is published, to compare with and to check against.

``model`` is what a plan is made of: model, machine, job, policy. ``cost`` has the formulas of the cost model (section
4.3 and its appendix), each written once and linear in the nine fractions. ``search`` turns them into a linear programme
for each block shape and looks for the best. ``paper`` holds the paper's own figures, to set predictions beside.

Symbols are the paper's: ``l`` layers, ``h1`` hidden size, ``h2`` MLP size, ``s`` prompt length, ``n`` output length,
``gbs`` GPU batch size; a fraction's first letter is what (w weights, c KV cache, h activations), its second where
(g device, c host, d disk).
"""

"""The paper's linear programme a second time, row by row from its formulas, for scipy. Of the planner's code nothing is
used but the constants of a case.

Columns: wg wc wd cg cc cd hg hc hd, Tpre, Tgen. A row's dictionary gives the factors of some columns, "1" a constant.
"""

import numpy as np
from scipy.optimize import linprog

from tests.engine.planner.reference.cases import Case

COLUMNS = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd", "Tpre", "Tgen")
Row = dict[str, float]


def add(*rows: Row) -> Row:
    """The sum of linear functions."""
    return {key: sum(row.get(key, 0.0) for row in rows) for key in {key for row in rows for key in row}}


def over(row: Row, divisor: float) -> Row:
    return {key: factor / divisor for key, factor in row.items()}


def off_device(kind: str, factor: float) -> Row:
    return {f"{kind}c": factor, f"{kind}d": factor}


def least_latency(case: Case) -> float | None:
    """T of the best policy of that block shape, in seconds; None if none fits."""
    model, machine, job, options = case.model, case.hardware, case.job, case.options
    s, n, h1, h2, nh, layers = job.s, job.n, model.h1, model.h2, model.n_heads, model.n_layers
    gbs, bls = case.gbs, case.gbs * case.n_batches
    fw = 4.5 / 16 if options.compress_weights else 1.0
    fc = 4.5 / 16 if options.compress_kv else 1.0
    wi = (8 * h1**2 + 4 * h1 * h2) * fw

    read = 4 * bls * (s + n / 2) * h1
    prefill = [
        over(add(off_device("w", wi), off_device("h", 2 * s * h1 * bls)), machine.ctog_bdw),
        add(
            over(off_device("c", 4 * (s + 1) * h1 * bls * fc), machine.gtoc_bdw_kv),
            over(off_device("h", 2 * s * h1 * bls), machine.gtoc_bdw_act),
        ),
        over({"wd": wi, "hd": 2 * s * h1 * bls}, machine.dtoc_bdw),
        {
            "cd": 4 * bls * (s + 1) * h1 * fc / machine.ctod_bdw_kv,
            "hd": 2 * s * h1 * bls / machine.ctod_bdw,
        },
        {
            "1": bls * (8 * s * h1**2 + 4 * s * h1 * h2) / machine.mm_flops_prefill
            + 4 * bls * s**2 * h1 / machine.bmm_flops_prefill
        },
    ]
    passed = {} if options.delegate else off_device("c", read * fc)
    products = {"1": bls * (8 * h1**2 + 4 * h1 * h2) / machine.mm_flops_decode}
    attention = (
        {"cg": read / machine.bmm_flops_decode, **off_device("c", read / machine.cpu_flops)}
        if options.delegate
        else {"1": read / machine.bmm_flops_decode}
    )
    decode = [
        over(add(off_device("w", wi), off_device("h", 2 * h1 * bls), passed), machine.ctog_bdw),
        over(off_device("h", 2 * h1 * bls), machine.gtoc_bdw_act),
        over({"cd": read * fc, "wd": wi, "hd": 2 * h1 * bls}, machine.dtoc_bdw),
        over({"cd": 4 * bls * h1 * fc, "hd": 2 * h1 * bls}, machine.ctod_bdw),
        add(products, attention),
    ]
    if not options.overlap:
        prefill, decode = [add(*prefill)], [add(*decode)]

    at_most_zero = [add(row, {"Tpre": -1.0}) for row in prefill] + [add(row, {"Tgen": -1.0}) for row in decode]
    kv_home = 4 * (s + n) * h1 * bls * layers * fc
    batch_kv = 4 * (s + n) * h1 * gbs * fc
    for decoding, positions, keys in ((False, s, s), (True, 1, s + n)):
        delegated = decoding and options.delegate
        act_home, act_batch = 2 * positions * h1 * bls, 2 * positions * h1 * gbs
        device = add(
            {"wg": wi * layers, "hg": act_home, "cg": kv_home},
            {"1": 2 * wi, "wg": -2 * wi},
            {"1": act_batch, "hg": -act_batch},
        )
        if decoding and not options.delegate:
            device = add(device, {"1": 2 * batch_kv, "cg": -2 * batch_kv})
        scores = 2 * gbs * positions * h1 + 2 * gbs * keys * h1 + 2 * gbs * nh * positions * keys
        workspaces: list[Row] = [
            {"1": gbs * (2 * positions * h1 + 3 * 2 * positions * h1)},
            {"cg": scores} if delegated else {"1": scores},
            {"1": gbs * (2 * positions * h1 + 2 * positions * h1)},
            {"1": gbs * (2 * positions * h1 + 2 * positions * h2)},
        ]
        at_most_zero += [within(machine.device_bytes, device, workspace) for workspace in workspaces]
        host = {"wc": wi * layers, "hc": act_home, "cc": kv_home, "wd": wi, "hd": act_batch, "cd": batch_kv}
        on_host = off_device("c", gbs * (2 * nh * (s + n) + 4 * h1)) if delegated else {}
        at_most_zero.append(within(machine.host_bytes, add(host, on_host)))
        at_most_zero.append(within(machine.disk_bytes, {"wd": wi * layers, "hd": act_home, "cd": kv_home}))
    return _solve(at_most_zero, layers, n)


def within(capacity: float, *rows: Row) -> Row:
    """At most zero where the sum fits, in units of some GB."""
    return over(add(*rows, {"1": -capacity}), max(capacity, 1e9))


def _solve(at_most_zero: list[Row], layers: int, n: int) -> float | None:
    unit = min(row["1"] for row in at_most_zero if "Tgen" in row and row.get("1", 0) > 0)  # seconds, for scale
    matrix = np.array([[row.get(column, 0.0) for column in COLUMNS] for row in at_most_zero])
    constants = np.array([row.get("1", 0.0) for row in at_most_zero])
    timed = np.array(["Tpre" in row or "Tgen" in row for row in at_most_zero])
    matrix[timed, :9] /= unit
    constants[timed] /= unit
    sums = np.array([[float(column[0] == kind) for column in COLUMNS] for kind in "wch"])
    found = linprog(
        [0.0] * 9 + [1.0, n - 1.0],
        A_ub=matrix, b_ub=-constants, A_eq=sums, b_eq=[1.0] * 3, method="highs-ds",
    )  # fmt: skip
    assert found.status in (0, 2), found.message
    return found.fun * unit * layers if found.status == 0 else None

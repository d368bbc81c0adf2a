"""Claims and records that have each kind of finding."""

from llmgeom.record import Record
from llmgeom.reports.findings import counting, findings
from llmgeom.reports.table import rows
from llmgeom.result import Result
from tests.made import made

ORDER = "PC1-entropy correlation: the first component ranks prompts by entropy."


def claim(name="|rho| of PC1 and entropy", verdict="open", value=0.4, half=0.1, **other):
    """A claim of an effect of 0.3 above a control whose centre is 0.2; its control gives 0.05 to 0.2."""
    given = dict(
        unit="|rho|", low=value - half, high=value + half, null_low=0.05, null_high=0.2, null="untrained",
        draws_of=20, p=0.04, verdict=verdict, claim=ORDER, centre=0.2, hurdle=0.25, effect=0.3, needed=120,
        source="Paper III, Table 1", among=1, p_excluded=0.5, noise=1.0,
    )  # fmt: skip
    return made(name, value, **(given | other))


def record(*estimates, probe="value_manifold", unmeasured=None, source="mixed", kind="domain", model="pocket:pythia"):
    measured = Result("Value manifold", tuple(estimates))
    return Record(
        results={probe: measured} if estimates else {},
        unmeasured=unmeasured or {},
        prompts={"text": ("a", "b"), "template": ("0", "1")},
        subject={"name": model, "self_check": "passed"},
        source={"name": source, "kind": kind},
        facts={},
    )


def said(*records, most=3):
    every = rows(records)
    return counting(records, every), findings(every, records, most)


def text_of(lines):
    return ["".join(text for _, text in line) for line in lines]

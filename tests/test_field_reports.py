"""docs/field-reports.md settles every public report, and every test it names exists.

Plan: the ids below are the whole list; the table must have each once, in order, settled in a known
form; `file::name` must be defined in that file, a quoted name must be a native test case.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Letter: numbers. 143 in all; the numbers have gaps.
REPORTS = {
    "A": "1 3 4 5 6 7 8 10 11 12 13 14 15 16",
    "B": "1 3 4 5 7 8 9 10",
    "C": "1 2 3 4 6 7 8 9 10 11 12 13 15 16",
    "D": "1 3 4 5 6 7 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
    "E": "1 2 3 4 5 6 7 9 10 11 12",
    "F": "1 2 3 4 5 7 8",
    "G": "1 3 4 5 6",
    "H": "1 2 3 4 6 7 8",
    "I": "2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    "J": "1 3 4 5 6 7",
    "K": "2 3 4 5 6",
    "L": "1 2 4 5 6 7",
    "M": "1 2 3 5 6",
    "N": "1 3 4 5 6 7 8 9 10 11 12",
    "O": "1 3 4 5 6 7",
    "P": "1 2 3 5",
}
IDS = [letter + number for letter, numbers in REPORTS.items() for number in numbers.split()]

ROW = re.compile(r"^\| (?P<id>[A-Z]\d+) \| (?P<kind>[^|]+) \| (?P<settled>[^|]+) \|$", re.MULTILINE)
PYTHON_TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")
NATIVE_TEST = re.compile(r'`"([^"`]+)"`')
UNSETTLED = re.compile(r"\bneeds \w+|\bcannot happen, because \w+")


def rows() -> dict[str, str]:
    text = (ROOT / "docs" / "field-reports.md").read_text()
    return {row["id"]: row["settled"] for row in ROW.finditer(text)}


def named(pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    found = {match.groups() for settled in rows().values() for match in pattern.finditer(settled)}
    return sorted(found)


@cache
def python_tests(file: str) -> frozenset[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@cache
def native_tests() -> frozenset[str]:
    def names() -> Iterator[str]:
        for path in sorted((ROOT / "tests" / "cpp").glob("*.cc")):
            yield from re.findall(r'TEST_CASE(?:_FIXTURE)?\([^"]*"([^"]+)"', path.read_text())

    return frozenset(names())


def test_there_are_143_reports_each_with_one_id():
    assert len(IDS) == len(set(IDS)) == 143


def test_every_report_is_settled_once():
    text = (ROOT / "docs" / "field-reports.md").read_text()
    assert [row["id"] for row in ROW.finditer(text)] == IDS


def test_every_settlement_is_a_test_a_need_or_a_reason():
    forms = (PYTHON_TEST, NATIVE_TEST, UNSETTLED)
    assert [
        f"{report}: {settled}"
        for report, settled in rows().items()
        if not any(form.search(settled) for form in forms)
    ] == []


def test_every_named_python_test_exists():
    named_tests = named(PYTHON_TEST)
    assert named_tests
    assert [name for name in named_tests if name[1] not in python_tests(name[0])] == []


def test_every_named_native_test_exists():
    named_tests = named(NATIVE_TEST)
    assert named_tests
    assert [name for (name,) in named_tests if name not in native_tests()] == []

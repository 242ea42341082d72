"""Fails if a test marked ``root`` (and no more) was skipped, according to pytest's junit report.

tests/conftest.py records the marker as a property of each test case.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def main(path: str) -> int:
    ran, skipped = 0, []
    for case in ET.parse(path).getroot().iter("testcase"):
        markers = {p.get("value") for p in case.iter("property") if p.get("name") == "marker"}
        if "root" not in markers or markers & {"gpu", "slow"}:
            continue  # those may be skipped for other reasons
        if case.find("skipped") is not None:
            skipped.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            ran += 1
    for name in skipped:
        print(f"needs root, was skipped although this is root: {name}", file=sys.stderr)
    print(f"tests that need root: {ran} ran, {len(skipped)} were skipped")
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

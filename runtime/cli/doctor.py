"""`troupe doctor`: the findings as a table or as JSON. Exit code 1 when something is missing."""

from __future__ import annotations

import argparse
import json

import msgspec

from runtime.config import Settings
from runtime.doctor import Finding, examine


async def main(options: argparse.Namespace) -> int:
    findings = await examine(Settings().home_directory())
    fine = all(finding.is_fine for finding in findings)
    print(json.dumps({"fine": fine, "findings": msgspec.to_builtins(findings)}) if options.json else table(findings))
    return 0 if fine else 1


def table(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'ok ' if finding.is_fine else 'NO '} {finding.name:<{width}}  {finding.value}")
        if finding.remedy is not None:
            lines.append(f"    {'':<{width}}  mend it: {finding.remedy}")
    missing = sum(not finding.is_fine for finding in findings)
    lines.append("everything is there" if not missing else f"{missing} of {len(findings)} things need mending")
    return "\n".join(lines)

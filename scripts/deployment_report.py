"""Writes docs/deployments.md from what compile.py printed of each deployment.

Run:    for NAME in kimi_k2_5_h100x8 llama4_scout_h200x2; do
          python scripts/compile.py --config=$NAME --json > reports/$NAME.json; done
        JAX_PLATFORMS=cpu python scripts/deployment_report.py --reports=reports
Expect: docs/deployments.json (all deployments so far) and docs/deployments.md, a row each.

Rows of deployments without a new report are kept, so that the table can be made in parts.
"""

import json
from pathlib import Path

from absl import app, flags

from trillion_infer.plan.deployment_table import document, row_of

REPORTS = flags.DEFINE_string("reports", None, "Folder of the JSON objects, a file each.", required=True)
OUTPUT = flags.DEFINE_string("output", "docs/deployments", "Path of the files, without .json and .md.")


def main(_: list[str]) -> None:
    data, page = Path(f"{OUTPUT.value}.json"), Path(f"{OUTPUT.value}.md")
    rows = {row["config"]: row for row in json.loads(data.read_text())} if data.exists() else {}
    for path in sorted(Path(REPORTS.value).glob("*.json")):
        if text := path.read_text().strip():
            row = row_of(json.loads(text))
            rows[row["config"]] = row
            print(f"{row['config']}: {row['programs']} programs, {row['kv_gib']} GiB for KV")
    ordered = [rows[name] for name in sorted(rows)]
    data.write_text("[\n" + ",\n".join(json.dumps(row) for row in ordered) + "\n]\n")
    page.write_text(document(ordered))


if __name__ == "__main__":
    app.run(main)

"""Writes the data of the tasks in docs/examples/lm_eval from the Python files of a folder.

python docs/examples/write_tasks.py runs/tasks launch/demo
"""

import json
import random
import sys
from pathlib import Path

to, folder = map(Path, sys.argv[1:])
to.mkdir(parents=True, exist_ok=True)
texts = [file.read_text() for file in sorted(folder.glob("*.py")) if file.stat().st_size]
draw = random.Random(0)
questions = []
for text in texts:
    lines = [line for line in text.splitlines() if line.strip()]
    for at in range(4, len(lines), 4):
        choices = [lines[at], *draw.sample([line for line in lines if line != lines[at]], 3)]
        draw.shuffle(choices)
        context = "\n".join(lines[at - 4 : at])
        questions.append({"context": context, "choices": choices, "answer": choices.index(lines[at])})

with open(to / "texts.jsonl", "w") as file:
    file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
with open(to / "next_line.jsonl", "w") as file:
    file.writelines(json.dumps(question) + "\n" for question in questions)

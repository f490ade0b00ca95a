"""Writes 200 short conversations as JSONL.

python docs/examples/write_chats.py chats.jsonl
"""

import json
import sys

COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow"}
QUESTIONS = (
    "What is the colour of {}?",
    "Which colour has {}?",
    "Tell me the colour of {}.",
    "The colour of {}, please?",
)
OPENINGS = (
    "",
    "Hello. ",
    "A question: ",
    "Please help. ",
    "Hi! ",
    "One more: ",
    "Quickly: ",
    "Well, ",
    "So, ",
    "Again: ",
)

with open(sys.argv[1], "w") as file:
    for opening in OPENINGS:
        for question in QUESTIONS:
            for thing, colour in COLOURS.items():
                asked = {"role": "user", "content": opening + question.format(thing)}
                answer = {"role": "assistant", "content": f"The colour of {thing} is {colour}."}
                file.write(json.dumps({"messages": [asked, answer]}) + "\n")

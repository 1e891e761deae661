#!/usr/bin/env python3
"""Render chats with tests/goldens/harmony/chat_template.jinja as transformers does, on the first day of 1970.

    python tools/goldens/harmony.py

Chats that the template refuses have the message of the refusal.
"""

import json
import pathlib

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

DIRECTORY = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens" / "harmony"


def message(role, content):
    return {"role": role, "content": content}


QUESTION = message("user", "How many boats?\n ")
ANSWER = message("assistant", "Seven, \"about\".")
CHATS = [
    [QUESTION],
    [message("system", "Be brief. "), QUESTION, ANSWER, message("user", "And nets? 日本")],
    [message("developer", "Be <b>long</b>.\n"), QUESTION, ANSWER],
    [QUESTION, message("assistant", "<|channel|>final<|message|>Seven")],
    [QUESTION, message("tool", "7")],
]


def main():
    template = _compile_jinja_template((DIRECTORY / "chat_template.jinja").read_text())
    chats = []
    for messages in CHATS:
        for prompt in (True, False):
            case = {"messages": messages, "add_generation_prompt": prompt}
            given = {**case, "tools": None, "documents": None, "strftime_now": lambda _: "1970-01-01"}
            try:
                case["rendered"] = template.render(**given)
            except jinja2.exceptions.TemplateError as error:
                case["refused"] = error.message
            chats.append("  " + json.dumps(case, ensure_ascii=False))
    (DIRECTORY / "text.json").write_text('{\n "chats": [\n' + ",\n".join(chats) + "\n ]\n}\n")


if __name__ == "__main__":
    main()

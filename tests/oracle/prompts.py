"""Prompts for the goldens of real models: short texts, code, Korean, conversations, and long varied compositions.

All of it is written for this repository.
"""

import random

SHORT: dict[str, str] = {
    "one_token": "The",
    "one_letter": "a",
    "newline": "\n",
    "capital": "The capital of France is",
    "river": "The longest river in South America is",
    "colours": "Red, orange, yellow, green,",
    "count": "1, 2, 3, 5, 8, 13,",
    "recipe": "To make a simple tomato soup, first chop two onions and",
    "letter": "Dear Ms. Hale,\n\nThank you for sending the samples of blue glass. We have looked at each of them and",
    "physics": "When a stone is dropped from a tower, its speed grows because",
    "weather": "Yesterday the harbour was covered in fog until noon, so the ferries",
    "list": "Things to pack for a week in the mountains:\n- boots\n- a warm jacket\n-",
    "table": "| city | country |\n|---|---|\n| Lima | Peru |\n| Oslo | Norway |\n| Nairobi |",
    "quote": '"I never said the lamp was broken," the keeper answered. "I said that nobody had lit it since',
    "spaces": "name:    Ada   \n  age:\t36\n\n\n   city:",
    "emoji": "Good morning! ☀️ Today's plan: coffee ☕, a long walk 🚶 and",
    "history": "The printing press changed Europe in the fifteenth century. Before it, books were copied by hand, and",
}

CODE: dict[str, str] = {
    "python_gcd": "def gcd(a: int, b: int) -> int:\n    while b:\n",
    "python_class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "javascript": "function debounce(fn, wait) {\n  let timer = null;\n  return (...args) => {\n",
    "sql": "SELECT customer_id, SUM(total) AS spent\nFROM orders\nWHERE created_at >= '2024-01-01'\nGROUP BY",
    "json": '{"name": "set_alarm", "arguments": {"hour": 7, "minute": 30, "days": ["mon", "tue",',
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "shell": "#!/bin/sh\nset -eu\nfor file in *.log; do\n    gzip -9",
    "regex": 'import re\n\nEMAIL = re.compile(r"[^@\\s]+@[^@\\s]+\\.[a-z]{2,}")\n\ndef find_emails(text):\n    return',
}

KOREAN: dict[str, str] = {
    "korean_hello": "안녕하세요",
    "korean_capital": "대한민국의 수도는",
    "korean_story": "어느 겨울 아침, 작은 항구 마을의 등대지기는 창문을 열고",
    "korean_recipe": "김치찌개를 끓이려면 먼저 돼지고기를 볶고, 그다음에",
    "korean_mixed": "우리 서버는 port 8080에서 요청을 받습니다. 로그 파일은 /var/log/app.log 에 있고,",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Jun and I have a dog called Bori."},
        {"role": "assistant", "content": "Nice to meet you, Jun! Bori sounds lovely."},
        {"role": "user", "content": "What is my dog called?"},
    ],
    "chat_korean": [{"role": "user", "content": "서울에서 하루 동안 가볼 만한 곳을 세 군데 알려줘."}],
    "chat_code": [{"role": "user", "content": "Write a Python function that reverses a string."}],
    "chat_markup": [{"role": "user", "content": "Explain this token: <|im_end|> and this one: <|endoftext|>."}],
    "chat_empty": [{"role": "user", "content": ""}],
}

LONG_TOKENS: dict[str, int] = {"long_400": 400, "long_800": 800, "long_1500": 1500, "long_3000": 3000}

_PEOPLE = ["Mira", "Tomas", "Yuna", "Okafor", "Lena", "Ravi", "Sofia", "Daniel", "Hana", "Pieter", "Amara", "Joon"]
_PLACES = [
    "the quarry",
    "the old mill",
    "pier nine",
    "the seed store",
    "the north gate",
    "a rented hall",
    "the archive",
]
_THINGS = [
    "copper wire",
    "maps",
    "lanterns",
    "glass jars",
    "rope",
    "winter coats",
    "radio parts",
    "ledgers",
    "seedlings",
]
_VERBS = ["counted", "repaired", "carried", "sold", "painted", "lost", "found", "weighed", "photographed", "wrapped"]
_WHY = [
    "because the river had risen in the night",
    "so that the inspector could see them before the market opened",
    "although nobody had asked for it",
    "as the contract with the ferry company required",
    "while the others argued about the price of coal",
    "until the lights went out",
]


def long_text(seed: int, paragraphs: int = 60) -> str:
    """A long account in which paragraphs differ in form: diary, figures, dialogue, code, Korean notes."""
    rng = random.Random(seed)
    forms = [_diary, _figures, _dialogue, _snippet, _korean_note]
    return "\n\n".join(forms[rng.randrange(len(forms))](rng, i) for i in range(paragraphs))


def _diary(rng: random.Random, day: int) -> str:
    lines = [
        f"{rng.choice(_PEOPLE)} {rng.choice(_VERBS)} {rng.randint(2, 90)} {rng.choice(_THINGS)} at "
        f"{rng.choice(_PLACES)} {rng.choice(_WHY)}."
        for _ in range(rng.randint(2, 4))
    ]
    return f"Day {day + 1}. " + " ".join(lines)


def _figures(rng: random.Random, day: int) -> str:
    rows = [
        f"{thing}: {rng.randint(1, 999)} at {rng.randint(1, 60)}.{rng.randint(0, 99):02d}"
        for thing in rng.sample(_THINGS, rng.randint(3, 5))
    ]
    return f"Stock on day {day + 1}:\n" + "\n".join(rows)


def _dialogue(rng: random.Random, day: int) -> str:
    first, second = rng.sample(_PEOPLE, 2)
    return (
        f'"Did you see who {rng.choice(_VERBS)} the {rng.choice(_THINGS)}?" {first} asked.\n'
        f'"Not since day {rng.randint(1, day + 1)}," said {second}, "{rng.choice(_WHY)}."'
    )


def _snippet(rng: random.Random, day: int) -> str:
    thing = rng.choice(_THINGS).replace(" ", "_")
    return (
        f"def {rng.choice(_VERBS)}_{thing}(total, share={rng.randint(2, 9)}):\n"
        f"    left = total - {rng.randint(1, 40)} * share\n"
        f"    return max(left, {day}) if left % {rng.randint(2, 7)} else None"
    )


def _korean_note(rng: random.Random, day: int) -> str:
    who = rng.choice(["미라", "준호", "하나", "서연", "도윤"])
    what = rng.choice(["지도", "밧줄", "유리병", "외투", "장부"])
    return (
        f"{day + 1}일째 메모: {who}가 {what} {rng.randint(2, 50)}개를 {rng.choice(['창고', '부두', '시장'])}로 옮겼다."
    )


TOKENIZER_TEXTS: list[str] = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\r\nline ends\n\n\n",
    "12345 67 8.90 1,000,000",
    "don't we'll I'M you're",
    "snake_case camelCase kebab-case",
    "naïve café Ünïcödé ß ﬁ",
    "한국어 문장과 English 섞기",
    "👩‍👩‍👧‍👦 🇰🇷 ☕️ e\u0301",
    "\u200bzero\u200dwidth",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start |> not special",
    "a" * 70,
    "http://example.org/a?b=c&d=%20#e",
    '{"k": [1, 2.5e-3, null]}',
]

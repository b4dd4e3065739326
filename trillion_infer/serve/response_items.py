"""The output items of /v1/responses, and the events that announce them."""

from collections.abc import Callable, Iterable
from typing import Any

from trillion_infer.text.tools import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallEnd, ToolCallStart

Json = dict[str, Any]


class ResponseItems:
    """Builds `items` from a message's events; each push returns the stream events that it causes, unnumbered.

    Log-probabilities wait for the text that their tokens make; those of reasoning and calls are dropped.
    """

    def __init__(self, new_id: Callable[[str], str]):
        self.items: list[Json] = []
        self._new_id = new_id
        self._open = False
        self._scores: list[Json] = []

    def push(self, events: Iterable[Event], scores: Iterable[Json] = ()) -> list[Json]:
        """`scores`: log-probabilities of the tokens behind `events`, as chat writes them."""
        self._scores += scores
        out: list[Json] = []
        for event in events:
            if not isinstance(event, ContentDelta):
                self._scores = []
            match event:
                case ContentDelta(text):
                    out += self._text("message", text)
                case ReasoningDelta(text):
                    out += self._text("reasoning", text)
                case ToolCallStart(_, id, name):
                    out += self.close()
                    call = {"type": "function_call", "call_id": id, "name": name, "arguments": ""}
                    out += self._add({**call, "id": self._new_id("fc"), "status": "in_progress"})
                case ArgumentsDelta(_, text):
                    self.items[-1]["arguments"] += text
                    out.append(self._event("response.function_call_arguments.delta", delta=text))
                case ToolCallEnd(_, complete):
                    out += self.close(complete)
        return out

    def _text(self, kind: str, text: str) -> list[Json]:
        out: list[Json] = []
        if not self._open or self.items[-1]["type"] != kind:
            out += self.close()
            item: Json = {"type": kind, "id": self._new_id("msg" if kind == "message" else "rs"), "content": []}
            if kind == "message":
                part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item |= {"role": "assistant", "status": "in_progress"}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item |= {"summary": []}
            out += self._add(item)
            item["content"].append(part)
            copy = {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
            out.append(self._event("response.content_part.added", content_index=0, part=copy))
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            more = {"logprobs": self._scores}
            part["logprobs"] += self._scores
            self._scores = []
        out.append(self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **more))
        return out

    def _add(self, item: Json) -> list[Json]:
        self.items.append(item)
        self._open = True
        copy = {**item, **({"content": []} if "content" in item else {})}
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": copy}]

    def close(self, complete: bool = True) -> list[Json]:
        """Ends the open item, if there is one. `complete` is False if it was cut off."""
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        if "status" in item:
            item["status"] = "completed" if complete else "incomplete"
        out = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            out.append(self._event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            out.append(self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more))
            out.append(self._event("response.content_part.done", content_index=0, part=part))
        out.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item})
        return out

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}

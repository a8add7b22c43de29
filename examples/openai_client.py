"""Stream an answer from a fleet with the official OpenAI client, and print where it was generated.

python examples/openai_client.py http://127.0.0.1:8000/v1 "Where does a river begin?"
"""

import sys

from openai import OpenAI


def main(url: str, question: str) -> None:
    """Ask one question."""
    client = OpenAI(base_url=url, api_key="unused")
    models = [model.id for model in client.models.list()]
    print("models:", ", ".join(models))

    # The raw response carries the headers that name the request and its worker.
    with client.chat.completions.with_streaming_response.create(
        model=models[0],
        messages=[{"role": "user", "content": question}],
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        # Constraints and hints for the router are headers; this one keeps a conversation on one worker.
        extra_headers={"x-headwater-session": "example"},
    ) as response:
        text, usage = "", None
        for chunk in response.parse():
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        print("answer:", " ".join(text.split()) or "(nothing printable)")
        if usage is not None:
            print(f"usage: {usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens")
        headers = response.headers
        print(f"request: {headers['x-request-id']}, worker {headers.get('x-headwater-worker', '')}")


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else ("http://127.0.0.1:8000/v1", "Where does a river begin?")))

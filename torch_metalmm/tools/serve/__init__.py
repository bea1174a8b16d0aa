"""Answers over HTTP: `metalmm serve`, an API as OpenAI's."""

"""An OpenAI-compatible server on one engine. Needs the extra `glm53[serve]`."""

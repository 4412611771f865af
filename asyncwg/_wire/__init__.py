"""What both sides agree on: frames, the codec, failure records. No asyncio, no processes."""

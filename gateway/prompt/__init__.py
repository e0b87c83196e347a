"""Step 2 of the street: a request's prompt becomes token ids and chain digests, and only what is new costs anything.

masking.py     special strings in users' text: hidden while the template runs, shown again after the cut
template.py    the model's chat template, as Hugging Face renders it
byte_level.py  a byte-level BPE tokenizer.json, proven equal and handed to tiktoken
tokenizer.py   special tokens, cuts, ids: one model's tokeniser, with the proofs it was loaded under
segments.py    the two memos: segments -> ids, chains of segments -> block digests
decode.py      ids -> text, piece by piece, with stop strings
signs.py       where a piece of text may end: not within an emoji
stage.py       the stage itself: street.Prompts
"""

"""Step 2 of the pipeline: a request's prompt becomes token ids and chain digests, and only what is new costs anything.

The way down:
stage.py         the stage itself: stages.Prompts
loaded.py        what is loaded for one tokeniser, and rendering with it
template.py      the model's chat template, as Hugging Face renders it; where breakpoints lie in the text
masking.py       special strings in users' text: hidden while the template runs, shown again after the cut
walk.py          down the memos, then on with what is new
segments.py      the memos: segments -> ids, chains of segments -> block digests, prompts -> all of it
tokenizer.py     special tokens, cuts, ids: one model's tokeniser, with the proofs it was loaded under
byte_level.py    a byte-level BPE tokenizer.json, proven equal and handed to tiktoken
guard.py         the reference that segments are compared with; samples.py  the texts for that

The way back:
reader.py        one answer: tokens in, chunks of text and of tool calls out, with their log probabilities
decode.py        ids -> text, chunk by chunk, with stop strings, and no emoji cut in two
tool_styles.py   how a model writes tool calls, and the grammar of an answer that has to have some
tool_calls.py    calls out of an answer while it is written; json_scan.py  their arguments
"""

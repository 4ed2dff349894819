"""The audit's prompts: two for each kind of text."""

from __future__ import annotations

PROMPTS = (
    "Customer: Hello, my parcel should have come on Monday and it is still not here.\nAgent:",
    "Customer: Hi, I would like to change the date of my booking.\nAgent:",
    "Once upon a time there was a lighthouse keeper who",
    "The market had just opened when the first rain fell, and",
    "Question: A box holds 12 pencils. Mia has 3 boxes and gives away 7 pencils. How many does she keep?\nAnswer:",
    "Question: A train leaves at 9 and travels 60 miles each hour. How far has it come at 12?\nAnswer:",
    'def median(values):\n    """Return the middle value of a list of numbers."""\n',
    '"""Write a function to count the vowels in a text."""\ndef',
    "Summary: The town council met on Tuesday to talk about the old bridge. It",
    "Write a short letter to a neighbour who looked after your cat.\n\nDear",
)

# Its last tokens occurred before, but the text need not continue as it did there.
REPEATING = "The first colour is red. The second colour is blue. The third colour is"

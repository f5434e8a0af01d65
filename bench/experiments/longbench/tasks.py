"""The 16 English tasks of LongBench: what is asked, how long an answer may be, and how it is scored.

When: a prompt is built or an answer is scored. The prompts have the official ones' roles (an instruction, the context,
the question, the start of the answer) in our own words, so that scores need not equal those of other harnesses to the
second digit; compare methods within one. Lengths of answers, metrics and what is cut from an answer are the official
settings. No chat template. Source: LongBench (Bai et al., arXiv 2308.14508).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.experiments.longbench.metrics import score

#: Enters the key of every result: a change of prompts must not be taken for a change of methods.
PROMPTS = 1

_SHORT = "Be as brief as you can, one phrase if possible, and do not explain."
_PASSAGES = (
    "Use the passages below to answer a question. Write the answer alone.\n\nPassages:\n{context}\n\n"
    "Using these passages, write the answer alone.\n\nQuestion: {input}\nAnswer:"
)


@dataclass(frozen=True)
class Task:
    """One data set.

    Attributes
    ----------
    name : str
        LongBench's name of the file.
    metric : str
        One of `metrics.METRICS`.
    new_tokens : int
        The longest answer, in tokens.
    examples : int
        How many the official file holds.
    template : str
        With ``{context}`` and, mostly, ``{input}``.
    first_line : bool
        Only the answer's first line is scored: a model that was shown examples goes on with more of them.
    stop_at_newline : bool
        Generation stops there.
    """

    name: str
    metric: str
    new_tokens: int
    examples: int
    template: str
    first_line: bool = False
    stop_at_newline: bool = False

    def prompt(self, context: str, question: str) -> str:
        """The text that the model continues. Braces in an example stay as they are."""
        before, _, after = self.template.partition("{context}")
        return before.replace("{input}", question) + context + after.replace("{input}", question)

    def trimmed(self, answer: str) -> str:
        """What is scored of an answer."""
        return answer.lstrip("\n").split("\n")[0] if self.first_line else answer

    def score(self, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
        """From 0 to 100, as the tables have it."""
        return 100 * score(self.metric, self.trimmed(answer), references, classes)


_ALL = (
    Task(
        "narrativeqa",
        "qa_f1",
        128,
        200,
        f"Below is a story, a novel or the script of a film, and then a question about it. {_SHORT}\n\n"
        f"Story: {{context}}\n\nAnswer the question from the story. {_SHORT}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    Task(
        "qasper",
        "qa_f1",
        128,
        200,
        "Below is a scientific article, and then a question about it. Answer in one phrase or sentence. If the article "
        'does not say, write "unanswerable". If it is a yes-or-no question, write "yes", "no" or "unanswerable". Do '
        "not explain.\n\nArticle: {context}\n\nAnswer the question from the article, in one phrase or sentence; write "
        '"unanswerable" if the article does not say, and "yes", "no" or "unanswerable" to a yes-or-no question. Do not '
        "explain.\n\nQuestion: {input}\n\nAnswer:",
    ),
    Task(
        "multifieldqa_en",
        "qa_f1",
        64,
        150,
        "Read this text.\n\n{context}\n\nAnswer a question about the text above, briefly and with the answer alone.\n\n"
        "Question: {input}\nAnswer:",
    ),
    Task("hotpotqa", "qa_f1", 32, 200, _PASSAGES),
    Task("2wikimqa", "qa_f1", 32, 200, _PASSAGES),
    Task("musique", "qa_f1", 32, 200, _PASSAGES),
    Task(
        "gov_report",
        "rouge_l",
        512,
        200,
        "Below is a report by a government agency. Summarise it on one page.\n\nReport:\n{context}\n\n"
        "Summarise the report on one page.\n\nSummary:",
    ),
    Task(
        "qmsum",
        "rouge_l",
        512,
        200,
        "Below is the transcript of a meeting, and then a query about it. Answer in one or more sentences.\n\n"
        "Transcript:\n{context}\n\nAnswer the query from the transcript, in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    Task(
        "multi_news",
        "rouge_l",
        512,
        200,
        "Below are several news articles. Summarise all of them on one page.\n\nNews:\n{context}\n\n"
        "Summarise all the news on one page.\n\nSummary:",
    ),
    Task(
        "trec",
        "classification",
        64,
        200,
        "Say of what type the last question is. These are examples.\n\n{context}\n{input}",
        first_line=True,
    ),
    Task(
        "triviaqa",
        "qa_f1",
        32,
        200,
        "Answer the question that follows the last passage. Write the answer alone. These are examples.\n\n"
        "{context}\n\n{input}",
        first_line=True,
    ),
    Task(
        "samsum",
        "rouge_l",
        128,
        200,
        "Summarise the last dialogue in a few short sentences. These are examples.\n\n{context}\n\n{input}",
        first_line=True,
        stop_at_newline=True,
    ),
    Task(
        "passage_count",
        "count",
        32,
        200,
        "Below are numbered paragraphs; some may be repetitions of others. Read them, find which are the same, and "
        "count how many different paragraphs there are.\n\n{context}\n\nHow many different paragraphs are there, each "
        "counted once? Write the number alone, such as 1, 2 or 3.\n\nThe number is: ",
    ),
    Task(
        "passage_retrieval_en",
        "retrieval",
        32,
        200,
        "Below are 30 paragraphs of Wikipedia, and then a summary of one of them. Say which one.\n\n{context}\n\n"
        'This is the summary.\n\n{input}\n\nWrite the number of its paragraph, as in "Paragraph 1" or "Paragraph 2".'
        "\n\nIt is: ",
    ),
    Task("lcc", "edit_similarity", 64, 500, "Go on with this code.\n{context}The next line of code is:\n"),
    Task(
        "repobench-p", "edit_similarity", 64, 500, "Go on with this code.\n{context}{input}The next line of code is:\n"
    ),
)
#: In the order of the paper's tables.
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}

// The prompts that the page offers. Each is a task that a small model can do without repeating itself.

const ACCOUNT = `class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount`;

const EDIT = `Add a docstring to every method of this Python class:\n\n\`\`\`python\n${ACCOUNT}\n\`\`\``;

const SUMMARY = `Summarise this text in one paragraph:

Speculative decoding makes a language model write faster without changing what it writes. A small and quick drafter \
guesses the next few tokens. The large model then checks all guesses in one pass, which takes about as long as writing \
a single token. Guesses that agree with the large model are kept, and the first wrong guess is replaced by the large \
model's own token. When the text is easy to guess, several tokens are written in each step. When it is hard to guess, \
little is lost.`;

export const EXAMPLES = [
  { title: "Edit code", note: "Add docstrings to a Python class", prompt: EDIT },
  { title: "Summarise", note: "A paragraph on speculative decoding", prompt: SUMMARY },
  { title: "Write code", note: "A stack with push, pop and peek", prompt: "Write a Python class `Stack` with push, pop, peek and is_empty, and show how to use it." },
  { title: "Explain", note: "Photosynthesis in three short paragraphs", prompt: "Explain photosynthesis in three short paragraphs." },
];

export const RACE_PROMPT = EDIT;

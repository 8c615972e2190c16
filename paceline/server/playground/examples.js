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

const EDIT = `Make \`deposit\` and \`withdraw\` refuse amounts that are not positive, and answer with the whole class:

\`\`\`python
${ACCOUNT}
\`\`\``;

const WRITE = "Write a Python class `Stack` with push, pop, peek and is_empty, and show how to use it.";

export const EXAMPLES = [
  { title: "Edit code", note: "Refuse amounts that are not positive", prompt: EDIT },
  { title: "Write code", note: "A stack with push, pop and peek", prompt: WRITE },
  { title: "Explain", note: "Photosynthesis", prompt: "Explain photosynthesis in three short paragraphs." },
  { title: "Advise", note: "Five tips for better sleep", prompt: "Give me five tips for better sleep." },
];

export const RACE_PROMPT = EDIT;

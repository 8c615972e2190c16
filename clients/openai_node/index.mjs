// OpenAI's SDK for Node.
//
//   npm install && node index.mjs --url http://127.0.0.1:8000/v1

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const at = process.argv.indexOf("--url");
const baseURL = at < 0 ? "http://127.0.0.1:8000/v1" : process.argv[at + 1];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const packageFile = new URL("./node_modules/openai/package.json", import.meta.url);
const { version } = JSON.parse(readFileSync(packageFile, "utf8"));

const passed = [];
const failed = {};

async function check(what, body) {
  try {
    await body();
    passed.push(what);
    console.log(`ok      ${what}`);
  } catch (error) {
    failed[what] = String(error.message ?? error);
    console.log(`FAILED  ${what}: ${failed[what]}`);
  }
}

const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Why is the sky blue? Answer in one sentence." }];
const greedy = { model, temperature: 0, max_tokens: 24 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } },
  required: ["name", "age"],
  additionalProperties: false,
};

await check("chat: same text whole, streamed and plain", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages });
  const plain = await client.chat.completions.create({ ...greedy, messages, speculation: { enabled: false } });
  const stream = await client.chat.completions.create({
    ...greedy, messages, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(text, plain.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

await check("chat: leaving a stream", async () => {
  const stream = await client.chat.completions.create({ ...greedy, messages, max_tokens: 2000, stream: true });
  for await (const _ of stream) break;
  stream.controller.abort();
});

await check("chat: logprobs, n", async () => {
  const made = await client.chat.completions.create({ ...greedy, messages, n: 2, logprobs: true, top_logprobs: 2 });
  assert.equal(made.choices.length, 2);
  for (const choice of made.choices) assert.equal(choice.logprobs.content[0].top_logprobs.length, 2);
});

await check("chat: tools, whole and streamed", async () => {
  const asked = {
    ...greedy, max_tokens: 60, tools: [weather], tool_choice: "required",
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
  };
  const whole = await client.chat.completions.create(asked);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  for (const made of [whole, streamed]) {
    const [call] = made.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
  }
});

await check("chat: json_schema", async () => {
  const made = await client.chat.completions.create({
    ...greedy, max_tokens: 100,
    messages: [{ role: "user", content: "Invent a person: name and age, as JSON." }],
    response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  assert.deepEqual(Object.keys(JSON.parse(made.choices[0].message.content)).sort(), ["age", "name"]);
});

await check("completions: echo, logprobs, streamed", async () => {
  const made = await client.completions.create({ ...greedy, prompt: "The capital of France is", echo: true, logprobs: 1 });
  assert.equal(made.choices[0].logprobs.token_logprobs[0], null);
  let text = "";
  const stream = await client.completions.create({ ...greedy, prompt: "The capital of France is", stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.text ?? "";
  assert.equal("The capital of France is" + text, made.choices[0].text);
});

await check("responses: whole and streamed", async () => {
  const asked = { model, input: messages[0].content, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.ok(text);
  assert.equal(text, whole.output_text);
});

await check("errors are the SDK's own", async () => {
  await assert.rejects(client.chat.completions.create({ messages, model: "gpt-4" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...greedy, messages: [] }), OpenAI.BadRequestError);
});

console.log(JSON.stringify({ client: "openai (npm)", version, passed, failed }));
process.exit(Object.keys(failed).length ? 1 : 0);

// Vercel's AI SDK, over OpenAI's form and over Anthropic's.
//
//   npm install && node index.mjs --url http://127.0.0.1:8000/v1

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const at = process.argv.indexOf("--url");
const baseURL = at < 0 ? "http://127.0.0.1:8000/v1" : process.argv[at + 1];
const packageFile = new URL("./node_modules/ai/package.json", import.meta.url);
const { version } = JSON.parse(readFileSync(packageFile, "utf8"));
globalThis.AI_SDK_LOG_WARNINGS = false;

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

const name = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;
const providers = {
  openai: createOpenAICompatible({ name: "paceline", baseURL, includeUsage: true, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(name),
};
const greedy = { temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const prompt = "Why is the sky blue? Answer in one sentence.";
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `21 degrees in ${city}`,
});
const person = jsonSchema({
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } },
  required: ["name", "age"],
  additionalProperties: false,
});

const texts = {};
for (const [api, model] of Object.entries(providers)) {
  await check(`${api}: generateText and streamText`, async () => {
    const whole = await generateText({ ...greedy, model, prompt, system: "You are brief." });
    const stream = streamText({ ...greedy, model, prompt, system: "You are brief." });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.ok(text);
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.equal(await stream.finishReason, whole.finishReason);
    texts[api] = text;
  });

  await check(`${api}: a tool, run, and an answer after it`, async () => {
    const asked = { ...greedy, model, maxOutputTokens: 60, tools: { weather }, prompt: "What is the weather in Paris?" };
    const forced = await generateText({ ...asked, toolChoice: "required" });
    assert.equal(forced.finishReason, "tool-calls");
    assert.equal(forced.toolCalls[0].toolName, "weather");
    assert.deepEqual(Object.keys(forced.toolCalls[0].input), ["city"]);
    assert.match(forced.toolResults[0].output, /^21 degrees/);
    const answered = await generateText({
      ...asked, prompt: undefined, stopWhen: stepCountIs(2),
      messages: [{ role: "user", content: asked.prompt }, ...forced.response.messages],
    });
    assert.ok(answered.steps.length >= 1);
  });

  await check(`${api}: a tool by name, streamed`, async () => {
    const stream = streamText({
      ...greedy, model, maxOutputTokens: 60, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" },
      prompt: "What is the weather in Paris?",
    });
    const kinds = new Set();
    for await (const part of stream.fullStream) kinds.add(part.type);
    assert.ok(kinds.has("tool-call") && kinds.has("tool-result"), [...kinds].join());
  });

  await check(`${api}: generateObject`, async () => {
    const made = await generateObject({
      ...greedy, model, maxOutputTokens: 200, schema: person, prompt: "Invent a person: name and age, as JSON.",
    });
    assert.deepEqual(Object.keys(made.object).sort(), ["age", "name"]);
  });

  await check(`${api}: leaving a stream`, async () => {
    const leaving = new AbortController();
    const stream = streamText({ ...greedy, model, prompt, maxOutputTokens: 2000, abortSignal: leaving.signal, onError() {} });
    for await (const _ of stream.textStream) { leaving.abort(); break; }
  });

  await check(`${api}: errors carry the status`, async () => {
    const hot = generateText({ ...greedy, model, prompt, maxOutputTokens: 0 });
    await assert.rejects(hot, (error) => error.statusCode === 400 || error.name === "AI_InvalidArgumentError");
    const other = api === "openai"
      ? createOpenAICompatible({ name: "paceline", baseURL })("gpt-4")
      : createAnthropic({ baseURL, apiKey: "none" })("claude-x");
    await assert.rejects(generateText({ ...greedy, model: other, prompt }), (error) => error.statusCode === 404);
  });
}

await check("both say the same", async () => assert.equal(texts.openai, texts.anthropic));

console.log(JSON.stringify({ client: "ai (npm)", version, passed, failed }));
process.exit(Object.keys(failed).length ? 1 : 0);

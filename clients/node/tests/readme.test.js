// Runs the programs and commands of README.md in order, and compares their output.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { freePort, repository, run, start, startServer } from "./server.js";

const PACKAGE = fileURLToPath(new URL("..", import.meta.url));
const BLOCK = /^```(js|console)\n([^]*?)^```$/gm;

test("the examples of README.md work as documented", async (t) => {
  const quickstart = readFileSync(join(repository, "examples/quickstart.yaml"), "utf8");
  const server = await startServer(/^rules:\n([^]*)$/m.exec(quickstart)[1]);
  // Programs in a folder inside the package can import `tidegate`, Express and Fastify.
  const folder = mkdtempSync(join(PACKAGE, ".readme-"));
  let background;
  t.after(async () => {
    await background?.stop();
    await server.stop();
    rmSync(folder, { recursive: true });
  });
  const port = await freePort();
  const local = (text) =>
    text
      .replaceAll("127.0.0.1:8080", server.address)
      .replace(/\b3000\b/g, port)
      // A machine that runs many tests at once is slow.
      .replaceAll("new Tidegate({ url", "new Tidegate({ timeoutMs: 20_000, url");

  const readme = readFileSync(join(PACKAGE, "README.md"), "utf8");
  let commands = 0;
  for (const [, language, text] of readme.matchAll(BLOCK)) {
    if (language === "js") {
      const [, name] = /^\/\/ (\S+\.mjs)\n/.exec(text);
      writeFileSync(join(folder, name), local(text));
      continue;
    }
    for (const { command, printed } of steps(text)) {
      commands += 1;
      if (command.endsWith(" &")) {
        await background?.stop();
        const program = basename(command.split(" ")[1]);
        const ready = new RegExp(printed.trim());
        background = await start(process.execPath, [program], ready, { cwd: folder });
        continue;
      }
      const output = await run("bash", ["-c", local(command)], { cwd: folder });
      assert.equal(normal(output), normal(printed), command);
    }
  }
  assert.equal(commands, 8);
});

/** Splits a block into commands and their output. */
function steps(block) {
  return block
    .split(/^\$ /m)
    .slice(1)
    .map((step) => {
      const end = step.indexOf("\n");
      return { command: step.slice(0, end), printed: step.slice(end + 1) };
    });
}

/** Normalizes wait times, because a slow machine may print a shorter one. */
function normal(output) {
  return output.replace(/retry in \d+ s/g, "retry in N s").replace(/\s+$/gm, "");
}

// The published package: its files, its entry points and their declarations.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { run } from "./server.js";

const PACKAGE = fileURLToPath(new URL("..", import.meta.url));
const ENTRY_POINTS = {
  tidegate: "index",
  "tidegate/express-rate-limit": "express-rate-limit",
  "tidegate/fastify": "fastify",
};

test("the published package has no dependencies and works alone", async (t) => {
  const folder = mkdtempSync(join(tmpdir(), "tidegate-pack-"));
  t.after(() => rmSync(folder, { recursive: true }));
  const npm = (args, cwd) => run("npm", [...args, "--offline", "--no-audit", "--no-fund"], { cwd });
  const packed = await npm(["pack", "--json", "--pack-destination", folder], PACKAGE);
  const [{ filename, files }] = JSON.parse(packed);
  const unexpected = files
    .map((file) => file.path)
    .filter((path) => !path.startsWith("src/") && !["package.json", "README.md"].includes(path));
  assert.deepEqual(unexpected, []);

  writeFileSync(join(folder, "package.json"), '{"type": "module"}');
  await npm(["install", "--omit=peer", join(folder, filename)], folder);
  const names = Object.keys(ENTRY_POINTS);
  const program = `
    for (const name of ${JSON.stringify(names)}) {
      console.log(JSON.stringify(Object.keys(await import(name)).sort()));
    }`;
  const options = { cwd: folder, input: program };
  const printed = await run(process.execPath, ["--input-type=module", "-"], options);
  const exported = printed.trim().split("\n").map((line) => JSON.parse(line));
  assert.deepEqual(exported, names.map(declared));
});

/** Returns the values exported by a declaration file. */
function declared(name) {
  const text = readFileSync(join(PACKAGE, `src/${ENTRY_POINTS[name]}.d.ts`), "utf8");
  const values = text.matchAll(/^export (?:class|function|const) (\w+)/gm);
  return [...values].map(([, value]) => value).sort();
}

// What the Python SDK and its code interpreter send, in both kinds, sent again: no registry
// here has these packages. The scripts beside the conversations made them.
import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { after, before, describe, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { play } from './conversation.mjs'
import { start } from './server.mjs'

const dir = join(dirname(fileURLToPath(import.meta.url)), 'recorded')
let server
before(async () => {
  server = await start()
})
after(() => server?.stop())

describe('recorded conversations are answered as they were', () => {
  for (const file of readdirSync(dir).filter((f) => f.endsWith('.json'))) {
    const conversation = JSON.parse(readFileSync(join(dir, file)))
    test(`${file}: ${conversation.client}, ${conversation.steps.length} requests`, { timeout: 120_000 }, () => play(conversation, server))
  }
})

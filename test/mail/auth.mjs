// auth.mjs signs, seals and verifies messages with independent software. For each line with {message, steps, check,
// records} that it reads, it writes one with {message, results}. A step is {sign},
// {seal} or {append}; records are the DNS: {"TXT a.example": [["text"]]}.
import { createRequire } from 'node:module'
import { createInterface } from 'node:readline'

const require = createRequire(import.meta.url)
// What it fetches brand logos with wants a newer Node than Debian's; nothing
// here fetches anything.
const undici = require.resolve('undici')
require.cache[undici] = { id: undici, filename: undici, loaded: true, exports: { Agent: class {} } }
const { authenticate } = require('mailauth')
const { dkimSign } = require('mailauth/lib/dkim/sign')

for await (const line of createInterface({ input: process.stdin })) {
  const input = JSON.parse(line)
  const resolver = async (name, type) => {
    const found = input.records[`${type} ${name.toLowerCase().replace(/\.$/, '')}`]
    if (found) return found
    throw Object.assign(new Error(`${type} ${name}: not there`), { code: 'ENOTFOUND' })
  }

  let message = Buffer.from(input.message, 'base64')
  for (const step of input.steps ?? []) {
    if (step.sign) {
      const { signatures, errors } = await dkimSign(message, { signatureData: [step.sign], ...step.options })
      if (errors.length > 0) throw new Error(JSON.stringify(errors.map((e) => String(e.err ?? e.message))))
      message = Buffer.concat([Buffer.from(signatures), message])
    }
    if (step.seal) {
      const { headers } = await authenticate(message, { ...step.check, resolver, seal: step.seal })
      message = Buffer.concat([Buffer.from(headers), message])
    }
    if (step.append) message = Buffer.concat([message, Buffer.from(step.append)])
  }
  const r = input.check ? await authenticate(message, { ...input.check, resolver, strict: true }) : undefined
  console.log(JSON.stringify({
    message: message.toString('base64'),
    results: r && {
      spf: r.spf?.status?.result,
      dkim: r.dkim.results.map((d) => d.status.result),
      arc: r.arc?.status?.result,
      dmarc: r.dmarc?.status?.result,
    },
  }))
}

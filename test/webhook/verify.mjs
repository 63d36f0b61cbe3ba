// Verifies deliveries as a receiver does, with the official library of Standard
// Webhooks and with the lines of E2B's documentation. Reads one JSON object a
// line, {secret, raw, headers, body, at}, and prints "ok", or why not, for each, as of
// when it came.
import { createHash } from 'node:crypto'
import { createInterface } from 'node:readline'
import { Webhook } from 'standardwebhooks'

for await (const line of createInterface({ input: process.stdin })) {
  const { secret, raw, headers, body, at } = JSON.parse(line)
  if (at) Date.now = () => at
  try {
    new Webhook(secret, raw ? { format: 'raw' } : undefined).verify(body, headers)
    const hash = createHash('sha256').update(secret + body).digest('base64').replace(/=+$/, '')
    if (headers['e2b-signature'] !== hash) throw new Error('e2b-signature differs')
    if (headers['e2b-signature'] !== hash.replace(/\+/g, '-').replace(/\//g, '_')) throw new Error('e2b-signature differs in the alphabet of URLs')
    console.log('ok')
  } catch (err) {
    console.log(String(err))
  }
}

// Reads messages with mailparser and postal-mime: {raw} in base64 as a line of
// JSON on standard input each, what each of them shows a recipient as a line of
// JSON on standard output.
import { createInterface } from 'node:readline'
import { simpleParser } from 'mailparser'
import PostalMime from 'postal-mime'
import { createHash } from 'node:crypto'

const digest = (content) => createHash('sha256').update(typeof content === 'string' ? Buffer.from(content) : Buffer.from(content ?? [])).digest('hex')
const people = (list) => {
  const out = []
  for (const a of [list ?? []].flat()) {
    if (a.group) {
      out.push(a.name ?? '', ...people(a.group))
    } else if (a.value) {
      out.push(...people(a.value))
    } else {
      out.push(a.name ?? '', a.address ?? '')
    }
  }
  return out
}

async function withMailparser(raw) {
  const m = await simpleParser(raw, { skipImageLinks: true, skipTextLinks: true })
  return {
    words: [m.subject ?? '', m.text ?? '', ...people(m.from), ...people(m.to), ...people(m.cc), ...people(m.replyTo), ...people(m.sender)],
    html: m.html || '',
    files: m.attachments.map((a) => ({ name: a.filename ?? '', sha256: digest(a.content), text: a.content.toString('latin1') })),
  }
}

async function withPostalMime(raw) {
  const m = await PostalMime.parse(raw)
  return {
    words: [m.subject ?? '', m.text ?? '', ...people(m.from), ...people(m.to), ...people(m.cc), ...people(m.replyTo), ...people(m.sender)],
    html: m.html ?? '',
    files: m.attachments.map((a) => ({ name: a.filename ?? '', sha256: digest(a.content), text: Buffer.from(a.content ?? []).toString('latin1') })),
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const raw = Buffer.from(JSON.parse(line).raw, 'base64')
  const out = {}
  for (const [name, read] of Object.entries({ mailparser: withMailparser, 'postal-mime': withPostalMime })) {
    try {
      out[name] = await read(raw)
    } catch (e) {
      out[name] = { error: String(e) }
    }
  }
  console.log(JSON.stringify(out))
}

// Reads one message with mailparser: {raw} as JSON on standard input.
import { text } from 'node:stream/consumers'
import { simpleParser } from 'mailparser'

const { raw } = JSON.parse(await text(process.stdin))
const m = await simpleParser(raw)
const first = (list) => list?.value[0].address ?? ''
console.log(
  JSON.stringify({
    from: first(m.from),
    to: first(m.to),
    subject: m.subject,
    text: m.text,
    html: m.html || '',
    inReplyTo: m.inReplyTo ?? '',
    messageID: m.messageId,
    attachments: m.attachments.map((a) => ({ name: a.filename, text: a.content.toString('utf8') })),
    headers: m.headerLines.map((h) => h.key),
  }),
)

// Writes messages with nodemailer as its users do, one in base64 on a line.
import MailComposer from 'nodemailer/lib/mail-composer/index.js'

const from = 'Agent <agent@p.example>'
const to = ['Bob <b@x.example>', '"Ünal, Dr." <u@y.example>']
const long = 'Grüße aus Köln, und noch einmal: '.repeat(8)
const lines = 'A line of words that is rather long, so that it has to be folded by whoever writes it. '.repeat(30) + '\n.\n..\nFrom here\n  trailing  \n'
const html = `<!DOCTYPE html><html><head><meta charset="utf-8"><title>Hi</title><style>p{margin:0}</style></head><body><p class="a">Grüße <a href="https://x.example/?a=1&b=2">here</a></p><img src="cid:logo" alt="logo"></body></html>`
const png = Buffer.from('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==', 'base64')
const messages = [
  { subject: 'hello', text: 'hello' },
  { subject: '', text: '' },
  { subject: long, text: lines },
  { subject: 'Привет 你好 🎉', text: long, html },
  { subject: 'html', html },
  { subject: 'inline', text: 'x', html, attachments: [{ filename: 'logo.png', content: png, cid: 'logo' }] },
  { subject: 'files', text: 'x', attachments: [{ filename: 'a b.txt', content: 'text' }, { filename: 'Übersicht 你好 with a rather long name that goes on and on and on and on and on.pdf', content: Buffer.alloc(5000, 7) }, { filename: 'empty.bin', content: Buffer.alloc(0) }, { filename: '"quoted" (x).csv', content: 'a,b\n1,2\n' }] },
  { subject: 'an invitation', text: 'x', html, icalEvent: { method: 'REQUEST', filename: 'invite.ics', content: 'BEGIN:VCALENDAR\r\nMETHOD:REQUEST\r\nBEGIN:VEVENT\r\nSUMMARY:Lunch\r\nEND:VEVENT\r\nEND:VCALENDAR\r\n' } },
  { subject: 'alternatives', text: 'x', alternatives: [{ contentType: 'text/x-web-markdown', content: '**Hello**' }] },
  { subject: 'Re: hello', text: 'x', inReplyTo: '<1@x.example>', references: Array.from({ length: 40 }, (_, i) => `<${i}.${'a'.repeat(40)}@x.example>`), replyTo: 'desk@p.example', cc: 'c@x.example', priority: 'high' },
  { subject: 'a list', text: 'x', list: { unsubscribe: { url: 'https://x.example/u?a=1', comment: 'Leave' }, help: 'admin@p.example?subject=help' }, headers: { 'X-Entity-Ref-ID': '12345', 'X-Campaign': 'a "b" c' } },
  { subject: 'qp', text: lines + long, textEncoding: 'quoted-printable' },
  { subject: 'base64', text: lines + long, html, textEncoding: 'base64' },
  { subject: 'flowed', text: lines, headers: { 'X-Long': 'word '.repeat(60) } },
  { subject: 'passed on', text: 'x', attachments: [{ filename: 'a.eml', contentType: 'message/rfc822', content: 'From: c@x.example\r\nReceived: from a\r\nReceived: from b\r\nSubject: inner\r\n\r\ninner\r\n' }] },
]
for (const m of messages) {
  const raw = await new MailComposer({ from, to, ...m }).compile().build()
  // Line ends as its SMTP transport sends them.
  console.log(Buffer.from(raw.toString('latin1').replace(/\r?\n/g, '\r\n'), 'latin1').toString('base64'))
}

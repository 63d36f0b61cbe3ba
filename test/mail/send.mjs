// Sends one message with nodemailer, as a person's mail program would. What to
// do is JSON on standard input: server "host:port", mail, and perhaps auth and
// secure. Prints the Message-ID and what the server said.
import { text } from 'node:stream/consumers'
import nodemailer from 'nodemailer'

const { server, mail, auth, secure = false, requireTLS = false } = JSON.parse(await text(process.stdin))
const [host, port] = server.split(':')
// The certificate of a test's server is its own.
const transport = nodemailer.createTransport({ host, port: Number(port), secure, requireTLS, auth, tls: { rejectUnauthorized: false } })
const { messageId, response } = await transport.sendMail(mail)
console.log(JSON.stringify({ messageID: messageId, response }))

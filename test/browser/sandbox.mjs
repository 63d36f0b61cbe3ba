// A person works in a sandbox with a real browser: looks at its page, opens a terminal, types,
// and sees that escape codes of what it runs cannot type, link or copy.
// node sandbox.mjs URL SETUP-LINK SANDBOX DIRECTORY-FOR-PICTURES
import assert from 'node:assert/strict'
import { mkdirSync } from 'node:fs'
import { chromium } from 'playwright-core'

const [url, link, id, shots] = process.argv.slice(2)
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking'] })
const context = await browser.newContext({ viewport: { width: 1440, height: 1100 } })
const page = await context.newPage()
const broken = []
page.on('console', (m) => { if (/Content Security Policy|Refused/.test(m.text())) broken.push(m.text()) })
page.on('pageerror', (e) => broken.push(String(e)))
await page.goto(link)
await page.fill('[name=name]', 'ann')
await page.fill('[name=password]', 'correct horse battery')
await page.fill('[name=again]', 'correct horse battery')
await page.click('main button[type=submit]')

const shot = async (name) => {
  for (const [form, width, scheme] of [['wide-light', 1440, 'light'], ['wide-dark', 1440, 'dark'], ['phone-light', 390, 'light'], ['phone-dark', 390, 'dark']]) {
    await page.setViewportSize({ width, height: 1100 })
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: 'reduce' })
    await page.screenshot({ path: `${shots}/${name}-${form}.png`, fullPage: true })
  }
  await page.setViewportSize({ width: 1440, height: 1100 })
  await page.emulateMedia({ colorScheme: 'light' })
}
// For docs/reference/console.md, if requested, as oversight.mjs does.
const docs = process.env.POSTERN_TEST_DOCS
const shown = async (name) => {
  if (!docs) return
  mkdirSync(docs, { recursive: true })
  for (const [form, viewport, colorScheme] of [['wide', { width: 1280, height: 860 }, 'light'], ['narrow', { width: 390, height: 780 }, 'dark']]) {
    await page.setViewportSize(viewport)
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' })
    await page.waitForTimeout(300)
    await page.screenshot({ path: `${docs}/${name}-${form}.png` })
  }
  await page.setViewportSize({ width: 1440, height: 1100 })
  await page.emulateMedia({ colorScheme: 'light' })
}
await page.goto(`${url}/console/sandboxes`)
await shot('sandboxes')
if (docs) {
  await page.waitForTimeout(60_000) // until there is something in the charts
  await page.reload()
  await shown('sandboxes')
}
await page.goto(`${url}/console/sandboxes/${id}`)
await shot('sandbox')
await shown('sandbox')
const processes = await page.textContent('[aria-labelledby=t-proc]')
assert.match(processes, /pid/, 'processes are listed')

// Download goes to a file, never to a page.
await page.goto(`${url}/console/sandboxes/${id}/file?path=/home/user/note.txt`)
await shot('file')
const [download] = await Promise.all([page.waitForEvent('download'), page.click('#download-form button')])
assert.equal(download.suggestedFilename(), 'note.txt')

await page.goto(`${url}/console/sandboxes/${id}`)
await page.check('#record').catch(() => {})
await page.click('#terminal-form button')
await page.waitForFunction(() => document.getElementById('terminal-state').textContent === 'open', null, { timeout: 30_000 })
await page.keyboard.type('printf "size %s\\n" "$(stty size)"; echo made-$((40+2))\n')
await page.waitForFunction(() => document.querySelector('.xterm-rows')?.textContent.includes('made-42'), null, { timeout: 30_000 })
// DA, DSR, DECRQSS, title report, a colour query, OSC 52 and OSC 8: nothing may be typed back.
await page.keyboard.type(`printf '\\033[c\\033[>c\\033[6n\\033[5n\\033[?6n\\033P$qm\\033\\\\\\033[21t\\033]10;?\\007\\033]52;c;ZXZpbA==\\007\\033]0;owned\\007\\033]8;;https://evil.example/\\007click\\033]8;;\\007\\033[38;2;1;200;3mcolour\\033[0m\\n'; read -t 1 -n 1 x; echo "typed[\${x}]done"\n`)
await page.waitForFunction(() => /typed\[\]done/.test(document.querySelector('.xterm-rows').textContent), null, { timeout: 30_000 })
assert.doesNotMatch(await page.title(), /owned/)
await shot('terminal')
await shown('terminal')
// A flood can be stopped.
await page.keyboard.type('yes flooding\n')
await page.waitForTimeout(1500)
await page.keyboard.press('Control+c')
await page.keyboard.type('echo still-$((1+1))\n')
await page.waitForFunction(() => document.querySelector('.xterm-rows').textContent.includes('still-2'), null, { timeout: 60_000 })

// Without a script: one command.
const plain = await browser.newContext({ javaScriptEnabled: false, storageState: await context.storageState() })
const bare = await plain.newPage()
await bare.goto(`${url}/console/sandboxes/${id}`)
await bare.fill('#line', 'echo hello-$((2*3)); printf "\\033[2J"')
await bare.click('#command-form button')
const out = await bare.textContent('main')
assert.match(out, /hello-6/)
assert.match(out, /\\u\{1b\}\[2J/)
assert.deepEqual(broken, [])
await browser.close()

// Helpers for the browser tests of the console: Chromium without JavaScript, a
// record of requests to other hosts, and screenshots, wide and narrow, light and
// dark.
import { chromium } from 'playwright-core'
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const [base, link, out, ...rest] = process.argv.slice(2)
if (!base || !link || !out) {
  console.error(`usage: node ${process.argv[1]} BASE_URL SETUP_LINK OUT_DIR`)
  process.exit(2)
}
mkdirSync(out, { recursive: true })
export { base, link, out, rest }

let passed = 0
let failed = 0
export function check(what, ok, detail) {
  ok ? passed++ : failed++
  console.log(`${ok ? 'ok  ' : 'FAIL'} ${what}${ok || detail === undefined ? '' : `: ${String(detail).slice(0, 500)}`}`)
  return ok
}

export const name = process.env.CONSOLE_NAME || 'ann'
export const password = 'correct horse battery staple'
const every = [
  { name: 'wide-light', viewport: { width: 1280, height: 900 }, colorScheme: 'light' },
  { name: 'wide-dark', viewport: { width: 1280, height: 900 }, colorScheme: 'dark' },
  { name: 'narrow-light', viewport: { width: 360, height: 800 }, colorScheme: 'light' },
  { name: 'narrow-dark', viewport: { width: 360, height: 800 }, colorScheme: 'dark' },
]

// Two variants are enough where the screenshots are not kept.
const variants = process.env.POSTERN_TEST_SCREENSHOTS ? every : [every[0], every[3]]

const home = mkdtempSync(join(tmpdir(), 'postern-browser-')) // nothing of the browser's stays
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  headless: true,
  timeout: 180_000,
  env: { ...process.env, HOME: home },
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
})
// A hanging page must not hang the test.
const watchdog = setTimeout(() => {
  console.log('FAIL the test took longer than 12 minutes')
  process.exit(1)
}, 720_000)

export const foreign = [] // requests that left for somewhere else
export const complaints = [] // of the browser: policy violations, unknown markup
function watch(context) {
  context.setDefaultTimeout(120_000)
  context.on('request', (r) => {
    if (new URL(r.url()).origin !== new URL(base).origin) foreign.push(r.url())
  })
  context.on('console', (m) => {
    if (m.type() === 'error' && !/status of 4\d\d/.test(m.text())) complaints.push(m.text())
  })
  return context
}
export async function open(options = {}) {
  const context = watch(await browser.newContext({ javaScriptEnabled: false, viewport: { width: 1280, height: 900 }, ...options }))
  context.on('page', whole)
  return context
}

// whole makes clicks wait until the next page has loaded completely. By default a
// click returns at the first bytes of that page, and what a test counts then
// depends on how the response was split.
function whole(page) {
  const locator = Object.getPrototypeOf(page.locator('html'))
  if (locator.whole) return
  const click = locator.click
  locator.whole = true
  locator.click = async function (...args) {
    await click.apply(this, args)
    await this.page().waitForLoadState()
  }
}

// visit opens the pages in every variant with the session in state, saves their
// screenshots and checks that none is wider than the screen.
export async function pictures(pages, state) {
  const tooWide = []
  for (const v of variants) {
    const context = await open({ viewport: v.viewport, colorScheme: v.colorScheme, storageState: state })
    const page = await context.newPage()
    for (const [title, path, act] of pages) {
      await page.goto(new URL(path, base).href)
      if (act) await act(page)
      await page.screenshot({ path: join(out, `${title}-${v.name}.png`), fullPage: true })
      const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)
      if (over > 0) tooWide.push(`${title} ${v.name} by ${over}px`)
    }
    await context.close()
  }
  check(`no page is wider than its screen: ${pages.map((p) => p[0]).join(', ')}`, tooWide.length === 0, tooWide.join(', '))
}

// tabTo presses Tab until the element with this id has the focus.
export async function tabTo(page, id, most = 60) {
  for (let i = 1; i <= most; i++) {
    await page.keyboard.press('Tab')
    if (await page.evaluate((id) => document.activeElement?.id === id, id)) return i
  }
  return 0
}

export async function fill(page, fields) {
  for (const [label, value] of Object.entries(fields)) await page.getByLabel(label, { exact: true }).fill(value)
}

// finish runs a test and exits with status 0 if all checks passed.
export async function finish(run) {
  try {
    await run()
  } catch (err) {
    check('the test runs to its end', false, err.stack)
  } finally {
    await browser.close()
    rmSync(home, { recursive: true, force: true, maxRetries: 5 })
    clearTimeout(watchdog)
  }
  console.log(`${passed} passed, ${failed} failed`)
  process.exit(failed === 0 ? 0 : 1)
}

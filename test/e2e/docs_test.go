package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A docBlock is a fenced block of a page, or a comment that begins with "test".
type docBlock struct {
	info string // what follows the opening fence: "sh", "sh server", "yaml policy.yaml"
	text string
	line int
}

// docBlocks returns the blocks of a page in their order.
func docBlocks(page string) (blocks []docBlock) {
	var open *docBlock
	end := ""
	for i, line := range strings.SplitAfter(page, "\n") {
		bare := strings.TrimSpace(line)
		switch {
		case open != nil && bare == end:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line
		case strings.HasPrefix(line, "```"):
			open, end = &docBlock{info: strings.TrimPrefix(bare, "```"), line: i + 1}, "```"
		case bare == "<!-- test":
			open, end = &docBlock{info: "sh", line: i + 1}, "-->"
		}
	}
	return blocks
}

var placeholder = regexp.MustCompile(`\b(act|msg|ibx|drf|pib|e2b|crd|run)_…`)

// docScript returns the commands of a page as one shell script, and how many
// blocks it runs. A page uses these blocks:
//
//   - "sh" is run, one after the other in one shell, which ends at the first failure.
//   - "sh server" has a server's command line in its last line. It runs in the
//     background, and the script goes on when it answers.
//   - Any other language with a second word is written to the file of that name.
//   - A comment that begins with "test" is run: it does what a reader does in a
//     browser or on another machine.
//   - All other blocks are only shown.
//
// In place of an ID or key that ends in "…" stands the last such one in the output.
func docScript(page string) (script string, n int) {
	var b strings.Builder
	for _, block := range docBlocks(page) {
		lang, name, _ := strings.Cut(block.info, " ")
		text := placeholder.ReplaceAllString(block.text, `$(last ${1}_)`)
		fmt.Fprintf(&b, "echo '--- line %d'\n", block.line)
		switch {
		case lang == "sh" && name == "server":
			fmt.Fprintf(&b, "%s &\nserver=$!\nserving\n", strings.TrimSpace(text))
			n++
		case lang == "sh" && name == "":
			b.WriteString(text)
			n++
		case lang != "sh" && name != "":
			fmt.Fprintf(&b, "cat >%s <<'END OF FILE'\n%sEND OF FILE\n", name, block.text)
		}
	}
	return b.String(), n
}

// docPrelude makes a network of the page's own, in which every port is free and
// nothing is reachable, and what the pages take for granted.
const docPrelude = `set -euo pipefail
ip link set lo up
last() { grep -aoE "\b$1[A-Za-z0-9_]{20,}" "$OUT" | tail -n 1; }
serving() {
	for _ in $(seq 1800); do
		curl -fsS -o /dev/null http://127.0.0.1:3000/health 2>/dev/null && [ -S "$POSTERN_DATA/postern.sock" ] && return
		kill -0 "$server"
		sleep 0.1
	done
	echo 'the server does not answer'; exit 1
}
# The official SDKs as npm has them were installed with the tests; here is no network.
npm() { [ "$1" = install ]; shift; mkdir -p node_modules; for p in "$@"; do ls -d "$MODULES/$p" >/dev/null; done; ln -sfn "$MODULES"/* node_modules/; }
server=
trap '[ -z "$server" ] || { kill "$server"; wait "$server" || true; }' EXIT
`

// TestPagesRun runs the commands of each page of the tutorial and the tasks
// against a real server, as a reader would who follows the page from its first
// line to its last.
func TestPagesRun(t *testing.T) {
	t.Parallel()
	bin := postern(t)
	modules, err := filepath.Abs("../../demo/node_modules")
	if err != nil {
		t.Fatal(err)
	}
	pages := []string{"../../docs/runs.md"}
	for _, pattern := range []string{"tutorial", "tasks"} {
		found, err := filepath.Glob("../../docs/" + pattern + "/*.md")
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	ran := 0
	for _, path := range pages {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		script, n := docScript(string(page))
		ran += n
		if n == 0 {
			continue
		}
		t.Run(filepath.Base(path), func(t *testing.T) {
			dir := t.TempDir()
			work, out := filepath.Join(dir, "work"), filepath.Join(dir, "out")
			if err := os.Mkdir(work, 0o700); err != nil {
				t.Fatal(err)
			}
			output, err := os.Create(out)
			if err != nil {
				t.Fatal(err)
			}
			defer output.Close()
			// A command that waits for ever, or for a person, ends the page and not the whole run.
			ctx, stop := context.WithTimeout(t.Context(), 5*time.Minute)
			defer stop()
			cmd := exec.CommandContext(ctx, "unshare", "--net", "bash", "-c", docPrelude+script)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
			cmd.Dir = work
			cmd.Stdout, cmd.Stderr = output, output
			cmd.WaitDelay = time.Minute
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(bin)+":"+os.Getenv("PATH"), "HOME="+dir,
				"POSTERN_DATA="+filepath.Join(dir, "data"), "OUT="+out, "MODULES="+modules)
			err = cmd.Run()
			text, _ := os.ReadFile(out)
			if err != nil {
				t.Errorf("%v\n%s", err, tail(string(text), 80))
			}
			if testing.Verbose() {
				t.Logf("%s", text)
			}
		})
	}
	if ran < 20 {
		t.Errorf("%d blocks of commands were run; are the pages still marked as docScript wants?", ran)
	}
}

package guest

import (
	"bytes"
	"io"
	"log/slog"
	"mime/multipart"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
)

// The benchmarks mean something inside a sandbox: build this package's test
// and run it there as root.

func BenchmarkAccount(b *testing.B) {
	for b.Loop() {
		if _, err := lookupAccount(testUser); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAs(b *testing.B) {
	a, err := lookupAccount(testUser)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := as(a, func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStat(b *testing.B) {
	g := newRig(b)
	for b.Loop() {
		if _, err := g.file.Stat(b.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: "/etc/passwd"})); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkList(b *testing.B) {
	g := newRig(b)
	for b.Loop() {
		if _, err := g.proc.List(b.Context(), connect.NewRequest(&processpb.ListRequest{})); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSpawn(b *testing.B) {
	prepareServer(slog.New(slog.DiscardHandler), 0)
	for b.Loop() {
		p, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{})
		if err != nil {
			b.Fatal(err)
		}
		_, _ = p.Wait()
	}
}

func BenchmarkRun(b *testing.B) {
	for _, args := range [][]string{{"/bin/true"}, {"/bin/sh", "-c", "true"}, {"/bin/bash", "-c", "true"}, {"/bin/bash", "-l", "-c", "true"}} {
		b.Run(args[len(args)-1]+" of "+args[0], func(b *testing.B) {
			g := newRig(b)
			no := false
			for b.Loop() {
				if _, err := g.run(connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: args[0], Args: args[1:]}, Stdin: &no})); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLogin compares a client's command in a new shell with one in a held
// shell, pair by pair, so that other load on the machine hits both.
func BenchmarkLogin(b *testing.B) {
	for _, text := range []string{"true", "/bin/true", "ls / >/dev/null", "echo " + strings.Repeat("x", 800)} {
		b.Run(strings.Fields(text)[0], func(b *testing.B) {
			g := newRig(b)
			req := func() *connect.Request[processpb.StartRequest] { return g.login(text) }
			var took [3][]time.Duration // new, start of the held one, held
			for b.Loop() {
				for way := range took {
					g.s.shells.off = way == 0
					begin := time.Now()
					if way == 1 {
						g.hold(req())
					} else if _, err := g.run(req()); err != nil {
						b.Fatal(err)
					}
					took[way] = append(took[way], time.Since(begin))
				}
			}
			for way, name := range []string{"new", "hold", "held"} {
				slices.Sort(took[way])
				b.ReportMetric(took[way][0].Seconds()*1000, name+"-min-ms")
				b.ReportMetric(took[way][len(took[way])/2].Seconds()*1000, name+"-p50-ms")
			}
		})
	}
}

func BenchmarkFile(b *testing.B) {
	g := newRig(b)
	const size = 64 << 20
	b.Run("write", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			if code, body, _ := g.do("POST", "/files?path=big", io.LimitReader(zeros{}, size), "Content-Type", octets); code != 200 {
				b.Fatalf("got %d %s", code, body)
			}
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			r := must(g.http.Get(g.url + "/files?path=big"))
			n, err := io.Copy(io.Discard, r.Body)
			r.Body.Close()
			if err != nil || n != size {
				b.Fatal(n, err)
			}
		}
	})
}

// BenchmarkMultipart is the parser alone, as the SDK's uploads go through it.
func BenchmarkMultipart(b *testing.B) {
	const size = 64 << 20
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	_ = w.SetBoundary("----formdata-undici-012345678901")
	p := must(w.CreateFormFile("file", "x"))
	_, _ = p.Write(bytes.Repeat([]byte("x"), size))
	w.Close()
	b.SetBytes(size)
	for b.Loop() {
		f := newForm(bytes.NewReader(body.Bytes()), w.Boundary())
		if _, err := f.next(); err != nil {
			b.Fatal(err)
		}
		if err := f.writeTo(io.Discard); err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}

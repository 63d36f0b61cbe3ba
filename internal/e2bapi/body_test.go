package e2bapi

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// uneven reads at most 100,000 bytes at a time, and not always the same number.
type uneven struct {
	r    io.Reader
	rand *rand.Rand
}

func (u *uneven) Read(p []byte) (int, error) {
	return u.r.Read(p[:min(len(p), 1+u.rand.IntN(100_000))])
}

func TestPumpPassesBodiesUnchanged(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	content := make([]byte, 3*pieceSize+12345)
	for i := range content {
		content[i] = byte(r.Uint32())
	}
	for _, size := range []int{0, 1, segment, pieceSize - chunkHead - chunkTail, pieceSize, 2*pieceSize + 1, len(content)} {
		for _, framed := range []bool{false, true} {
			for name, src := range map[string]io.Reader{
				"whole":         bytes.NewReader(content[:size]),
				"uneven":        &uneven{bytes.NewReader(content[:size]), r},
				"ends with EOF": iotest.DataErrReader(bytes.NewReader(content[:size])),
			} {
				var out bytes.Buffer
				p := &pump{src: src, framed: framed}
				n, err := p.run(&out)
				var got io.Reader = &out
				if framed {
					out.WriteString("0\r\n\r\n")
					got = httputil.NewChunkedReader(&out)
				}
				b, rerr := io.ReadAll(got)
				if n != int64(size) || err != nil || rerr != nil || !bytes.Equal(b, content[:size]) {
					t.Errorf("%s, %d bytes, framed %v: got %d, %v, %v and %d bytes", name, size, framed, n, err, rerr, len(b))
				}
			}
		}
	}
}

// A caller's stream must not wait until a buffer is full.
func TestPumpSendsWhatHasArrived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body, in := io.Pipe()
		out, to := io.Pipe()
		p := &pump{src: body}
		done := make(chan error, 1)
		go func() {
			_, err := p.run(to)
			to.Close()
			done <- err
		}()
		for _, word := range []string{"a", "few", "words"} {
			io.WriteString(in, word)
			time.Sleep(time.Second)
			b := make([]byte, len(word))
			if _, err := io.ReadFull(out, b); err != nil || string(b) != word {
				t.Fatalf("got %q, %v", b, err)
			}
		}
		in.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A sandbox that stops reading, or ends, must not leave a goroutine behind, and an
// incomplete body must not look complete.
func TestPumpEndsWithEitherSide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cut := errors.New("cut")
		out, to := io.Pipe()
		time.AfterFunc(time.Second, func() { out.CloseWithError(cut) })
		p := &pump{src: zeros{}}
		if _, err := p.run(to); !errors.Is(err, cut) {
			t.Errorf("the sandbox has ended: got %v", err)
		}
		p = &pump{src: io.MultiReader(bytes.NewReader(make([]byte, pieceSize)), iotest.ErrReader(cut))}
		if n, err := p.run(io.Discard); n != pieceSize || !errors.Is(err, cut) {
			t.Errorf("the caller has ended: got %d, %v", n, err)
		}
	})
}

func TestLargeUploadsReachTheGuestWhole(t *testing.T) {
	content := make([]byte, 3<<20)
	for i := range content {
		content[i] = byte(rand.Uint32())
	}
	check := func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || !bytes.Equal(b, content) || r.Trailer.Get("Sum") != r.Header.Get("Want-Sum") {
			http.Error(w, "changed", http.StatusBadRequest)
		}
	}
	d := serveData(t, Config{Domain: "boxes.example"}, map[uint16]string{49983: inside(t, check), 80: inside(t, check)})
	for name, pumps := range map[string]int{"with a pump": maxPumps, "with all pumps taken": 0} {
		d.proxy.Transport = newTransports(&http.Transport{DialContext: d.boxes.dial, DisableCompression: true}, pumps)
		for _, port := range []int{49983, 80} {
			for _, length := range []int64{-1, int64(len(content))} {
				r := d.request(t, "POST", host(port), "/files?path=/x", http.Header{"X-Access-Token": {"access-" + testID}, "E2b-Traffic-Access-Token": {"traffic-" + testID}}, nil)
				r.Body, r.ContentLength = io.NopCloser(&uneven{bytes.NewReader(content), rand.New(rand.NewPCG(1, 2))}), length
				if length < 0 {
					r.Trailer = http.Header{"Sum": {"7"}}
					r.Header.Set("Want-Sum", "7")
				}
				for range 2 { // the connection is whole afterwards
					if resp := d.do(t, r); resp.StatusCode != http.StatusOK {
						t.Errorf("%s, port %d, length %d: got %d %s", name, port, length, resp.StatusCode, text(t, resp))
					}
					r = d.request(t, "POST", host(port), "/files?path=/x", r.Header.Clone(), bytes.NewReader(content))
					r.Header.Del("Want-Sum")
				}
			}
		}
	}
}

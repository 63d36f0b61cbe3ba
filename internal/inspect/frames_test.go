package inspect

import (
	"bytes"
	"encoding/binary"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"postern/internal/inject"
)

// frame returns a frame of a WebSocket with a payload, masked if mask is not zero.
func frame(payload []byte, mask [4]byte) []byte {
	out := []byte{0x81}
	masked := byte(0)
	if mask != [4]byte{} {
		masked = 0x80
	}
	switch n := len(payload); {
	case n < 126:
		out = append(out, masked|byte(n))
	case n < 1<<16:
		out = binary.BigEndian.AppendUint16(append(out, masked|126), uint16(n))
	default:
		out = binary.BigEndian.AppendUint64(append(out, masked|127), uint64(n))
	}
	if masked != 0 {
		out = append(out, mask[:]...)
	}
	for i, c := range payload {
		out = append(out, c^mask[i%4])
	}
	return out
}

func TestSentinelsInFramesAreNoticed(t *testing.T) {
	sentinel := "pst_" + strings.Repeat("a", 40)
	for _, mask := range [][4]byte{{}, {1, 2, 3, 4}, {0xff, 0, 0, 0x80}} {
		for _, before := range []int{0, 100, 5000, 70000} {
			stream := frame([]byte("hello"), mask)
			stream = append(stream, frame(nil, mask)...)
			stream = append(stream, frame([]byte(strings.Repeat("x", before)+sentinel), mask)...)
			stream = append(stream, frame([]byte("bye"), mask)...)
			for name, r := range map[string]io.Reader{"whole": bytes.NewReader(stream), "by byte": iotest.OneByteReader(bytes.NewReader(stream)), "in pieces": &pieces{bytes.Clone(stream), 37}} {
				found := 0
				got, err := io.ReadAll(&frameScan{r: r, scan: &sentinelScan{secrets: []inject.Secret{{Sentinel: sentinel}}, found: func(*inject.Secret) { found++ }}})
				if err != nil || !bytes.Equal(got, stream) || found != 1 {
					t.Errorf("%s, mask %v, after %d: %v, same %v, found %d times", name, mask, before, err, bytes.Equal(got, stream), found)
				}
			}
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(frame([]byte("pst_"), [4]byte{1, 2, 3, 4}))
	f.Add([]byte{0x82, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4, 5})
	f.Fuzz(func(t *testing.T, b []byte) {
		secrets := []inject.Secret{{Sentinel: "pst_" + strings.Repeat("a", 40)}}
		count := func(r io.Reader) (n int) {
			got, err := io.ReadAll(&frameScan{r: r, scan: &sentinelScan{secrets: secrets, found: func(*inject.Secret) { n++ }}})
			if err != nil || !bytes.Equal(got, b) {
				t.Fatalf("%v; the stream was changed: %v", err, !bytes.Equal(got, b))
			}
			return n
		}
		if whole, cut := count(bytes.NewReader(b)), count(iotest.OneByteReader(bytes.NewReader(b))); whole != cut {
			t.Fatalf("found %d times in the whole and %d by byte", whole, cut)
		}
	})
}

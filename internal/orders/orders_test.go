package orders

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"postern/internal/guest/processpb"
)

func event(e *processpb.ProcessEvent) *processpb.StartResponse {
	return &processpb.StartResponse{Event: e}
}

func started(pid uint32) *processpb.StartResponse {
	return event(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: pid}}})
}

func data(d *processpb.ProcessEvent_DataEvent) *processpb.StartResponse {
	return event(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: d}})
}

func ended() *processpb.StartResponse {
	return event(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: &processpb.ProcessEvent_EndEvent{Exited: true}}})
}

// encode returns messages as a stream.
func encode(t testing.TB, json bool, ms ...*processpb.StartResponse) (out []byte) {
	t.Helper()
	for _, m := range ms {
		b, err := proto.Marshal(m)
		if json {
			b, err = protojson.Marshal(m)
		}
		if err != nil {
			t.Fatal(err)
		}
		out = binary.BigEndian.AppendUint32(append(out, 0), uint32(len(b)))
		out = append(out, b...)
	}
	return out
}

// TestOutputIsCountedExactly: of answers in both encodings, of events of every length, in
// pieces of any size.
func TestOutputIsCountedExactly(t *testing.T) {
	for _, json := range []bool{false, true} {
		ms := []*processpb.StartResponse{started(7)}
		var stdout, stderr int64
		for n := range 2000 {
			b := bytes.Repeat([]byte{0xfb}, n) // in base64 full of + and /
			ms = append(ms, data(&processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: b}}),
				data(&processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stderr{Stderr: b[:n/2]}}),
				data(&processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Pty{Pty: b[:n/3]}}))
			stdout, stderr = stdout+int64(n)+int64(n/3), stderr+int64(n/2)
		}
		stream := encode(t, json, append(ms, ended())...)
		for _, piece := range []int{1, 3, 511, 1 << 16, len(stream)} {
			var pid int32
			f := &frames{json: json, began: func(p int32) { pid = p }}
			for p := range slices.Chunk(stream, piece) {
				f.add(p)
			}
			if f.stdout != stdout || f.stderr != stderr || !f.ended || pid != 7 {
				t.Errorf("json %v, in pieces of %d: %d and %d bytes, ended %v, process %d; want %d and %d, process 7", json, piece, f.stdout, f.stderr, f.ended, pid, stdout, stderr)
			}
		}
	}
}

// TestMessagesAreCut: the beginning of a long message is handed on, and what comes behind
// it is found.
func TestMessagesAreCut(t *testing.T) {
	var stream []byte
	var want []string
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		b := bytes.Repeat([]byte{byte('a' + i%26)}, r.IntN(40))
		stream = append(binary.BigEndian.AppendUint32(append(stream, byte(i)), uint32(len(b))), b...)
		want = append(want, fmt.Sprint(byte(i), string(b[:min(len(b), 10)]), len(b) <= 10))
	}
	for _, piece := range []int{1, 2, 5, 7, 1000} {
		var got []string
		s := &splitter{most: 10, message: func(flags byte, b []byte, whole bool) { got = append(got, fmt.Sprint(flags, string(b), whole)) }}
		for p := range slices.Chunk(stream, piece) {
			s.add(p)
		}
		if !slices.Equal(got, want) {
			t.Errorf("in pieces of %d: %q, want %q", piece, got, want)
		}
	}
}

// FuzzFrames: an answer of a hostile sandbox takes neither the server down nor its memory.
func FuzzFrames(f *testing.F) {
	long := bytes.Repeat([]byte("x"), 700)
	for _, json := range []bool{false, true} {
		f.Add(encode(f, json, started(1), data(&processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: long}}), ended()), json)
	}
	f.Add([]byte("\x00\xff\xff\xff\xff"+base64.StdEncoding.EncodeToString(long)), true)
	f.Fuzz(func(t *testing.T, b []byte, json bool) {
		fr := &frames{json: json, began: func(int32) {}}
		for p := range slices.Chunk(b, 17) {
			fr.add(p)
		}
		if fr.stdout < 0 || fr.stderr < 0 || fr.split != nil && (len(fr.split.b) > maxEvent || len(fr.split.tail) > tailSize) {
			t.Errorf("counted %d and %d, kept %d bytes", fr.stdout, fr.stderr, len(fr.split.b))
		}
	})
}

// FuzzWire: a client's message that cannot be read is an error.
func FuzzWire(f *testing.F) {
	b, err := proto.Marshal(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "ls", Args: []string{"-l"}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, false, true, "")
	f.Add([]byte(`{"process":{"cmd":"ls"}}`), true, false, "gzip")
	f.Fuzz(func(t *testing.T, b []byte, json, enveloped bool, coding string) {
		var m processpb.StartRequest
		w := wire{json: json, envelope: enveloped, coding: coding}
		_ = w.first(b, &m)
	})
}

package orders

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"postern/internal/command"
	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
	"postern/internal/sandbox"
)

// A wire is how the messages of a call are encoded: Connect's protocol or gRPC's, JSON or
// Protocol Buffers.
type wire struct {
	json     bool
	envelope bool   // five bytes come before each message: flags and its length
	coding   string // of messages, or of the body without envelopes; "gzip" or empty
}

// wireOf returns the wire of a request.
func wireOf(h http.Header) (w wire, ok bool) {
	m := mediaType(h)
	switch {
	case m == "application/json" || m == "application/proto":
		w.coding = h.Get("Content-Encoding")
	case strings.HasPrefix(m, "application/connect+"):
		w.envelope, w.coding = true, h.Get("Connect-Content-Encoding")
	case strings.HasPrefix(m, "application/grpc"): // and gRPC-Web
		w.envelope, w.coding = true, h.Get("Grpc-Encoding")
	default:
		return w, false
	}
	w.json = strings.HasSuffix(m, "json")
	return w, true
}

// envelope is the size of the head of a message, and compressed the flag of a message that
// has the coding.
const (
	envelope   = 5
	compressed = 1
)

// first decodes the first message of a body into m.
func (w wire) first(b []byte, m proto.Message) error {
	flags := byte(compressed)
	if w.envelope {
		if len(b) < envelope || uint64(binary.BigEndian.Uint32(b[1:])) > uint64(len(b)-envelope) {
			return errors.New("the message is incomplete")
		}
		flags, b = b[0], b[envelope:envelope+int(binary.BigEndian.Uint32(b[1:]))]
	}
	return w.decode(flags, b, m)
}

// decode decodes a message without its head into m.
func (w wire) decode(flags byte, b []byte, m proto.Message) error {
	if w.coding != "" && w.coding != "identity" && flags&compressed != 0 {
		if w.coding != "gzip" {
			return fmt.Errorf("unknown coding %.20q", w.coding)
		}
		z, err := gzip.NewReader(bytes.NewReader(b))
		if err != nil {
			return err
		}
		if b, err = io.ReadAll(io.LimitReader(z, maxRead)); err != nil {
			return err
		}
	}
	if w.json {
		return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, m)
	}
	return proto.Unmarshal(b, m)
}

// call passes on a call of the guest's processes and files.
func (t *transport) call(id string, req *http.Request) (*http.Response, error) {
	switch req.URL.Path {
	case processpb.ProcessStartProcedure:
		return t.start(id, req)
	case processpb.ProcessSendInputProcedure, processpb.ProcessSendSignalProcedure,
		filesystempb.FilesystemMakeDirProcedure, filesystempb.FilesystemMoveProcedure, filesystempb.FilesystemRemoveProcedure:
		return t.unary(id, req)
	case processpb.ProcessStreamInputProcedure:
		return t.stream(id, req)
	}
	return t.next.RoundTrip(req)
}

// start passes on the start of a process, and counts what its client gets.
func (t *transport) start(id string, req *http.Request) (*http.Response, error) {
	req, b, whole, err := peek(req)
	if err != nil {
		return nil, err
	}
	o := &command.Order{Op: command.OpRun, Size: -1}
	w, known := wireOf(req.Header)
	var m processpb.StartRequest
	if known && whole && w.first(b, &m) == nil {
		o.Command(append([]string{m.GetProcess().GetCmd()}, m.GetProcess().GetArgs()...))
		o.Dir, o.Tag = m.GetProcess().GetCwd(), m.GetTag()
		if m.GetPty() != nil {
			o.Op = command.OpTerminal
		}
	} else {
		// The guest refuses what cannot be read, or the kernel tells what it starts.
		o.Command([]string{"(a request that cannot be read)"})
	}
	ticket, err := t.order(id, req, o)
	if err != nil {
		return nil, errors.Join(err, req.Body.Close())
	}
	c := *req
	c.Header = req.Header.Clone()
	c.Header.Del("Connect-Accept-Encoding")
	c.Header.Del("Grpc-Accept-Encoding")
	if c.Header.Del(sandbox.PlainHeader); ticket.Plain {
		c.Header.Set(sandbox.PlainHeader, "1")
	}
	resp, err := t.next.RoundTrip(&c)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	f := &frames{json: w.json, began: ticket.Began}
	resp.Body = &counted{Reader: resp.Body, Closer: resp.Body, seen: f.add, done: func(int64, bool) {
		if f.stdout+f.stderr > 0 {
			ticket.Ended(f.stdout, f.stderr, 0, "", f.ended)
		}
	}}
	return resp, nil
}

// unary passes on a call with one message.
func (t *transport) unary(id string, req *http.Request) (*http.Response, error) {
	req, b, whole, err := peek(req)
	if err != nil {
		return nil, err
	}
	w, known := wireOf(req.Header)
	read := func(m proto.Message) bool { return known && whole && w.first(b, m) == nil }
	o := &command.Order{Size: -1}
	switch req.URL.Path {
	case processpb.ProcessSendInputProcedure:
		var m processpb.SendInputRequest
		if !read(&m) {
			// One message of several mebibytes: its size is what can be said of it.
			err = t.to.Input(req.Context(), id, "others", b)
		} else {
			err = t.to.Input(req.Context(), id, target(m.GetProcess()), input(m.GetInput()))
		}
		if err != nil {
			return nil, errors.Join(err, req.Body.Close())
		}
		return t.next.RoundTrip(req)
	case processpb.ProcessSendSignalProcedure:
		var m processpb.SendSignalRequest
		o.Op = command.OpSignal
		if read(&m) {
			o.PID, o.Tag = int32(m.GetProcess().GetPid()), m.GetProcess().GetTag()
			o.Command([]string{strings.TrimPrefix(m.GetSignal().String(), "SIGNAL_")})
		}
	case filesystempb.FilesystemMakeDirProcedure:
		var m filesystempb.MakeDirRequest
		o.Op = command.OpMakeDir
		if read(&m) {
			o.Path = m.GetPath()
		}
	case filesystempb.FilesystemMoveProcedure:
		var m filesystempb.MoveRequest
		o.Op = command.OpMove
		if read(&m) {
			o.Path, o.To = m.GetSource(), m.GetDestination()
		}
	case filesystempb.FilesystemRemoveProcedure:
		var m filesystempb.RemoveRequest
		o.Op = command.OpRemove
		if read(&m) {
			o.Path = m.GetPath()
		}
	}
	if _, err := t.order(id, req, o); err != nil {
		return nil, errors.Join(err, req.Body.Close())
	}
	return t.next.RoundTrip(req)
}

// stream passes on a stream of input to a process, and records each message as it passes.
func (t *transport) stream(id string, req *http.Request) (*http.Response, error) {
	w, known := wireOf(req.Header)
	if !known || req.Body == nil {
		return t.next.RoundTrip(req)
	}
	to := "others"
	s := &splitter{most: maxRead, message: func(flags byte, b []byte, whole bool) {
		var m processpb.StreamInputRequest
		if !whole || w.decode(flags, b, &m) != nil {
			_ = t.to.Input(req.Context(), id, "others", b)
			return
		}
		if m.GetStart() != nil {
			to = target(m.GetStart().GetProcess())
		}
		if m.GetData() != nil {
			// If it cannot be recorded, the next request is refused: a stream that has begun
			// has no answer in which to say so.
			_ = t.to.Input(req.Context(), id, to, input(m.GetData().GetInput()))
		}
	}}
	c := *req
	c.Body = &counted{Reader: req.Body, Closer: req.Body, seen: s.add}
	return t.next.RoundTrip(&c)
}

// target names a process as a client did.
func target(s *processpb.ProcessSelector) string {
	if tag := s.GetTag(); tag != "" {
		return "tag " + tag
	}
	return fmt.Sprint("pid ", s.GetPid())
}

// input returns the bytes of an input.
func input(i *processpb.ProcessInput) []byte {
	if b := i.GetPty(); b != nil {
		return b
	}
	return i.GetStdin()
}

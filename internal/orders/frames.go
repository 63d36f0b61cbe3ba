package orders

import (
	"bytes"
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"postern/internal/guest/processpb"
)

// A splitter cuts a stream of messages, each behind its head, and hands on the first most
// bytes of each.
type splitter struct {
	most    int
	message func(flags byte, b []byte, whole bool)

	head [envelope]byte
	got  int    // of head
	left uint64 // bytes of the message that have not come
	size uint64 // of the message
	b    []byte // its beginning
	tail []byte // its last bytes, at most tailSize
}

// tailSize is enough for the padding of base64 and the brackets behind it.
const tailSize = 6

// add takes the next bytes of the stream.
func (s *splitter) add(p []byte) {
	for len(p) > 0 || s.got == envelope && s.left == 0 {
		if s.got < envelope {
			n := copy(s.head[s.got:], p)
			s.got, p = s.got+n, p[n:]
			if s.got < envelope {
				return
			}
			s.size = uint64(binary.BigEndian.Uint32(s.head[1:]))
			s.left, s.b, s.tail = s.size, s.b[:0], s.tail[:0]
		}
		n := int(min(uint64(len(p)), s.left))
		s.b = append(s.b, p[:min(n, s.most-len(s.b))]...)
		s.tail = append(s.tail, p[max(0, n-tailSize):n]...)
		s.tail = s.tail[max(0, len(s.tail)-tailSize):]
		s.left -= uint64(n)
		p = p[n:]
		if s.left > 0 {
			return
		}
		s.message(s.head[0], s.b, s.size == uint64(len(s.b)))
		s.got = 0
	}
}

// frames reads the answer to the start of a process: the process's ID, and how much output
// the client gets. The answer comes from the sandbox and is hostile; all that it can falsify
// is these numbers.
type frames struct {
	json  bool
	began func(pid int32)

	stdout, stderr int64
	ended          bool // the process's end was in the answer
	unread         int  // events that could not be read

	split *splitter
}

// maxEvent bounds the events that are decoded whole, in bytes. Of longer ones, which carry
// output, the beginning is enough: their length is known.
const maxEvent = 512

// maxUnread is how many events of an answer may be unreadable before the rest is not counted.
const maxUnread = 16

func (f *frames) add(p []byte) {
	// The attack: millions of small events, each of which costs more to read than to send.
	if f.ended || f.unread > maxUnread {
		return
	}
	if f.split == nil {
		f.split = &splitter{most: maxEvent, message: f.event}
	}
	f.split.add(p)
}

// event counts one event.
func (f *frames) event(flags byte, b []byte, whole bool) {
	if flags != 0 || len(b) == 0 {
		f.unread++
		return // compressed, which was not asked for, the end of the stream, or nothing
	}
	if !whole {
		f.long(b, int64(f.split.size))
		return
	}
	var m processpb.StartResponse
	if f.json && (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, &m) != nil || !f.json && proto.Unmarshal(b, &m) != nil {
		f.unread++
		return
	}
	e := m.GetEvent()
	switch {
	case e.GetStart() != nil && f.began != nil:
		f.began(int32(e.GetStart().GetPid()))
		f.began = nil // the first answer counts
	case e.GetData() != nil:
		f.stdout += int64(len(e.GetData().GetStdout()) + len(e.GetData().GetPty()))
		f.stderr += int64(len(e.GetData().GetStderr()))
	case e.GetEnd() != nil:
		f.ended = true
	}
}

// long counts an event with much output, of which b is the beginning and size the length.
func (f *frames) long(b []byte, size int64) {
	var n int64
	var err bool
	if f.json {
		// {"event":{"data":{"stdout":"BASE64"}}}. Base64 has no quotes.
		const end = int64(len(`"}}}`))
		quote := bytes.LastIndexByte(b[:min(len(b), 64)], '"')
		if quote < 0 {
			return
		}
		err = bytes.Contains(b[:quote], []byte(`"stderr"`))
		n = (size-int64(quote)-1-end)/4*3 - int64(bytes.Count(f.split.tail, []byte("=")))
	} else {
		b = field(field(b, 1), 2) // StartResponse.event, ProcessEvent.data
		number, kind, tag := protowire.ConsumeTag(b)
		if tag < 0 || kind != protowire.BytesType {
			return
		}
		length, used := protowire.ConsumeVarint(b[tag:])
		if used < 0 || length > uint64(size) {
			return
		}
		n, err = int64(length), number == 2
	}
	if n <= 0 {
		return
	}
	if err {
		f.stderr += n
	} else {
		f.stdout += n
	}
}

// field returns the content of a message's first field if it has that number, as far as it
// is there.
func field(b []byte, want protowire.Number) []byte {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 || number != want || kind != protowire.BytesType {
		return nil
	}
	_, used := protowire.ConsumeVarint(b[n:])
	if used < 0 {
		return nil
	}
	return b[n+used:]
}

package e2bapi

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"

	"postern/internal/sandbox"
)

// segment is what the largest packet of a link carries, in bytes: the headers of IP and
// TCP and a timestamp come off. A write that is a little longer makes a packet that is
// almost empty, which costs both ends as much as a full one.
const segment = sandbox.LinkMTU - 20 - 20 - 12

// pieceSize is the size of a buffer for large request bodies, in bytes: four packets.
const pieceSize = 4 * segment

// smallBody is how much of a request body is passed on read by read, in bytes, before a
// pump is worth its cost.
const smallBody = 128 << 10

// maxPumps bounds the pumps of the server, and so their memory: 32 MiB. Bodies beyond it
// are copied in turns through one smaller buffer, so that a caller who begins uploads
// and stalls makes others slower and the server no larger.
const maxPumps = 64

// A piece is a buffer of a pump.
type piece struct {
	b      [pieceSize]byte
	filled int  // bytes to be sent; grows
	done   bool // no more comes
	last   bool // nor after it
}

var pieces = sync.Pool{New: func() any { return new(piece) }}

// A pump copies a body through two pieces, of which one is sent while the other is
// filled. What has arrived is sent at once unless something is being sent; then it waits
// for more. So a fast body travels in full packets, and a slow one does not wait.
type pump struct {
	src    io.Reader
	framed bool // make a chunk of HTTP/1.1 of each read

	mu    sync.Mutex
	moved sync.Cond // mu; queue, a piece in it or err has changed
	queue []*piece  // at most two
	err   error     // of sending
}

// What is before and after the data of a chunk, in bytes.
const chunkHead, chunkTail = len("00010000\r\n"), len("\r\n")

// run copies until the end of src. It returns the number of bytes of src that were read.
func (p *pump) run(dst io.Writer) (int64, error) {
	p.moved.L = &p.mu
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		p.send(dst)
	}()
	n, err := p.receive()
	<-sent
	if p.err != nil {
		return n, p.err
	}
	return n, err
}

// receive reads src into pieces.
func (p *pump) receive() (total int64, err error) {
	for err == nil {
		b := p.add()
		if b == nil {
			return total, nil
		}
		var n int64
		n, err = p.fill(b)
		total += n
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return total, err
}

// add appends an empty piece to the queue. It returns nil if sending has failed.
func (p *pump) add() *piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) == 2 && p.err == nil {
		p.moved.Wait()
	}
	if p.err != nil {
		return nil
	}
	b, _ := pieces.Get().(*piece)
	b.filled, b.done, b.last = 0, false, false
	p.queue = append(p.queue, b)
	return b
}

// fill reads until b is full.
func (p *pump) fill(b *piece) (total int64, err error) {
	head, tail := 0, 0
	if p.framed {
		head, tail = chunkHead, chunkTail
	}
	at := 0
	for more := true; more; {
		var n int
		n, err = p.src.Read(b.b[at+head : len(b.b)-tail])
		if n > 0 {
			if p.framed {
				copy(b.b[at:], fmt.Sprintf("%08x\r\n", n))
				copy(b.b[at+head+n:], "\r\n")
			}
			at += head + n + tail
			total += int64(n)
		}
		more = err == nil && len(b.b)-at > head+tail
		p.mu.Lock()
		b.filled, b.done, b.last = at, !more, err != nil
		more = more && p.err == nil
		p.moved.Broadcast()
		p.mu.Unlock()
	}
	return total, err
}

// send writes the pieces to dst until the last one or an error.
func (p *pump) send(dst io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for at := 0; ; {
		if len(p.queue) == 0 {
			p.moved.Wait()
			continue
		}
		b := p.queue[0]
		n := b.filled - at
		switch {
		case n == 0 && !b.done:
			p.moved.Wait()
			continue
		case n == 0:
			last := b.last
			p.queue, at = p.queue[1:], 0
			pieces.Put(b)
			p.moved.Broadcast()
			if last {
				return
			}
			continue
		case n > segment:
			n -= n % segment
		}
		p.mu.Unlock()
		_, err := dst.Write(b.b[at : at+n])
		p.mu.Lock()
		if err != nil {
			p.err = err
			p.moved.Broadcast()
			return
		}
		at += n
	}
}

// A streamedBody is a request body of unknown length for the guest. The transport would
// send it in chunks of 32 KiB, each of which would leave in three packets.
type streamedBody struct {
	io.ReadCloser
	conn *wideConn // that the request is sent on; nil if it is wrapped in TLS
}

// stream makes the body of req a streamedBody where that is of use. Only the guest gets
// one: a service of the user's may not know zeros before the length of a chunk.
func stream(req *http.Request) *http.Request {
	if req.Body == nil || req.Body == http.NoBody || req.ContentLength >= 0 || targetOf(req.Context()).port != sandbox.GuestPort {
		return req
	}
	body := &streamedBody{ReadCloser: req.Body}
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) { body.conn, _ = i.Conn.(*wideConn) },
	}))
	req.Body = body
	return req
}

// WriteTo implements [io.WriterTo]. The transport calls it with a writer that makes a
// chunk of each write and sends it at once. So nothing is left in its buffers after a
// write, and more chunks can go to the connection directly.
func (s *streamedBody) WriteTo(w io.Writer) (int64, error) {
	n, more, err := copySmall(w, s.ReadCloser)
	if err != nil || !more {
		return n, err
	}
	if s.conn == nil || !s.conn.enter() {
		m, err := copyAll(w, s.ReadCloser)
		return n + m, err
	}
	defer s.conn.leave()
	p := &pump{src: s.ReadCloser, framed: true}
	m, err := p.run(s.conn)
	return n + m, err
}

// copySmall copies the first smallBody bytes. More reports whether it stopped there.
func copySmall(w io.Writer, r io.Reader) (n int64, more bool, err error) {
	b := buffers.Get()
	defer buffers.Put(b)
	n, err = io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(r, smallBody), b)
	return n, n == smallBody && err == nil, err
}

// copyAll copies in turns.
func copyAll(w io.Writer, r io.Reader) (int64, error) {
	b := buffers.Get()
	defer buffers.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, b)
}

// A wideConn is a connection into a sandbox that copies large request bodies with a
// pump. The transport itself uses 32 KiB.
type wideConn struct {
	net.Conn
	pumps chan struct{} // semaphore, of the server
}

// enter returns false if there are too many pumps.
func (c *wideConn) enter() bool {
	select {
	case c.pumps <- struct{}{}:
		return true
	default:
		return false
	}
}

func (c *wideConn) leave() { <-c.pumps }

// CloseWrite ends the stream to the service and leaves the other open.
func (c *wideConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// ReadFrom implements [io.ReaderFrom], for a body whose length is known.
func (c *wideConn) ReadFrom(r io.Reader) (int64, error) {
	n, more, err := copySmall(c.Conn, r)
	if err != nil || !more {
		return n, err
	}
	if !c.enter() {
		m, err := copyAll(c.Conn, r)
		return n + m, err
	}
	defer c.leave()
	p := &pump{src: r}
	m, err := p.run(c.Conn)
	return n + m, err
}

package keeper

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// The two ends may be of different versions of this program: a server is
// replaced while its sandboxes run. So what a message means must never change;
// version says which of them there are.
const version = 1

// The operations. A request is answered by its own number: put, hello and all
// with opDone or opError; drop and bye with nothing.
const (
	opHello byte = 'h' // version, and how many links to keep at most (4 bytes)
	opPut   byte = 'p' // name; with the descriptor
	opDrop  byte = 'd' // name
	opAll   byte = 'a' // answered by one opLink for each link first
	opBye   byte = 'b'
	opDone  byte = 'k'
	opError byte = 'x' // sentence
	opLink  byte = 'l' // name; with the descriptor
)

const (
	maxID      = 64 // bytes of a name
	maxMessage = 256
	headSize   = 5
)

type message struct {
	op   byte
	seq  uint32
	body []byte
}

func encode(op byte, seq uint32, body []byte) []byte {
	b := binary.BigEndian.AppendUint32(append(make([]byte, 0, maxMessage), op), seq)
	return append(b, body[:min(len(body), maxMessage-headSize)]...)
}

func decode(b []byte) (message, error) {
	if len(b) < headSize {
		return message{}, errors.New("the message is too short")
	}
	return message{b[0], binary.BigEndian.Uint32(b[1:]), b[headSize:]}, nil
}

// onlyRight returns the one descriptor that control messages carry, -1 if they
// carry none. If they carry anything else all is closed, and ok is false.
func onlyRight(oob []byte) (fd int, ok bool) {
	fd, ok = -1, true
	if len(oob) == 0 {
		return fd, ok
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1, false
	}
	var all []int
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		ok = ok && err == nil
		all = append(all, fds...)
	}
	if ok && len(all) == 1 {
		return all[0], true
	}
	for _, fd := range all {
		unix.Close(fd)
	}
	return -1, false
}

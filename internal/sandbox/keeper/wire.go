package keeper

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// The two ends may be different versions of this program, since a server is
// replaced while its sandboxes run. So the meaning of a message must never change.
// The version says which messages exist.
const version = 1

// The operations. The answer to a request carries its number. put, hello and all
// are answered by opDone or opError; drop and bye by nothing.
const (
	opHello byte = 'h' // version, and the maximum number of links (4 bytes)
	opPut   byte = 'p' // name; carries the descriptor
	opDrop  byte = 'd' // name
	opAll   byte = 'a' // answered by one opLink for each link, and then opDone
	opBye   byte = 'b'
	opDone  byte = 'k'
	opError byte = 'x' // sentence
	opLink  byte = 'l' // name; carries the descriptor
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

// onlyRight returns the descriptor in control messages, or -1 if there is none. If
// there is anything else it closes all and returns ok false.
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

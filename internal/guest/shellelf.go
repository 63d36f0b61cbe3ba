package guest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A shellImage says where a shell's program keeps what is needed to hold it before
// it reads its startup files. The fields are offsets from where it is loaded,
// unless they say otherwise. Bash exports the names for loadable builtins.
type shellImage struct {
	entry   uint64 // first instruction
	startup uint64 // function maybe_execute_file: its first caller reads /etc/profile
	command uint64 // pointer command_execution_string: the argument of -c
	value   uint64 // function get_string_value: returns the text of a variable
	begun   uint64 // struct timeval shellstart: when the shell was started
	seconds uint64 // time_t shell_start_time: likewise, for $SECONDS
}

// What readShellImage reads at most. Debian's bash has 3,000 symbols.
const (
	maxSections = 256
	maxSymbols  = 64 << 10
	maxNames    = 4 << 20 // bytes
)

var errNoShellImage = errors.New("not a shell that can be held")

// readShellImage finds the symbols of a shell. The file is hostile: whoever is root
// in the sandbox may have replaced it. All sizes are bounded, and a wrong offset
// hurts a process of that sandbox only.
func readShellImage(r io.ReaderAt) (shellImage, error) {
	head := make([]byte, 64)
	if _, err := r.ReadAt(head, 0); err != nil {
		return shellImage{}, fmt.Errorf("%w: %w", errNoShellImage, err)
	}
	le := binary.LittleEndian
	const dynamic, amd64 = 3, 62 // ET_DYN, EM_X86_64
	if !bytes.HasPrefix(head, []byte("\x7fELF\x02\x01")) || le.Uint16(head[16:]) != dynamic || le.Uint16(head[18:]) != amd64 {
		return shellImage{}, fmt.Errorf("%w: not a position-independent amd64 program", errNoShellImage)
	}
	im := shellImage{entry: le.Uint64(head[24:])}
	at, size, n := le.Uint64(head[40:]), le.Uint16(head[58:]), le.Uint16(head[60:])
	if size != 64 || n == 0 || n > maxSections || at > 1<<40 {
		return shellImage{}, fmt.Errorf("%w: strange section headers", errNoShellImage)
	}
	sections := make([]byte, int(n)*64)
	if _, err := r.ReadAt(sections, int64(at)); err != nil {
		return shellImage{}, fmt.Errorf("%w: %w", errNoShellImage, err)
	}
	const dynsym = 11 // SHT_DYNSYM
	for i := range int(n) {
		s := sections[i*64 : i*64+64]
		link := le.Uint32(s[40:])
		if le.Uint32(s[4:]) != dynsym || link >= uint32(n) {
			continue
		}
		symbols, err := section(r, s, maxSymbols*24)
		if err != nil {
			return shellImage{}, err
		}
		names, err := section(r, sections[link*64:link*64+64], maxNames)
		if err != nil {
			return shellImage{}, err
		}
		im.find(symbols, names)
	}
	if im.entry == 0 || im.startup == 0 || im.command == 0 || im.value == 0 || im.begun == 0 || im.seconds == 0 {
		return shellImage{}, fmt.Errorf("%w: it does not export the symbols", errNoShellImage)
	}
	return im, nil
}

// section reads the section with that header.
func section(r io.ReaderAt, header []byte, most uint64) ([]byte, error) {
	at, size := binary.LittleEndian.Uint64(header[24:]), binary.LittleEndian.Uint64(header[32:])
	if size > most || at > 1<<40 {
		return nil, fmt.Errorf("%w: a section of %d bytes", errNoShellImage, size)
	}
	b := make([]byte, size)
	if _, err := r.ReadAt(b, int64(at)); err != nil && size > 0 {
		return nil, fmt.Errorf("%w: %w", errNoShellImage, err)
	}
	return b, nil
}

// find sets the fields whose symbols are in a symbol table.
func (im *shellImage) find(symbols, names []byte) {
	le := binary.LittleEndian
	for ; len(symbols) >= 24; symbols = symbols[24:] {
		at, value, size := le.Uint32(symbols), le.Uint64(symbols[8:]), le.Uint64(symbols[16:])
		if uint64(at) >= uint64(len(names)) || value == 0 || value > 1<<32 {
			continue
		}
		name, _, ok := bytes.Cut(names[at:min(len(names), int(at)+32)], []byte{0})
		if !ok {
			continue
		}
		switch kind := symbols[4] & 15; {
		case kind == 2 && string(name) == "maybe_execute_file": // STT_FUNC
			im.startup = value
		case kind == 2 && string(name) == "get_string_value":
			im.value = value
		case kind != 1: // STT_OBJECT
		case size == 8 && string(name) == "command_execution_string":
			im.command = value
		case size == 16 && string(name) == "shellstart":
			im.begun = value
		case size == 8 && string(name) == "shell_start_time":
			im.seconds = value
		}
	}
}

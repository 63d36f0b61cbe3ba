package guest

import "encoding/binary"

// starterCode executes the program that its first argument names, with the remaining
// arguments and its own environment.
var starterCode = [...]byte{
	0xb8, 72, 0, 0, 0, 0xbf, starterStatus, 0, 0, 0, // mov $SYS_fcntl, %eax; mov $starterStatus, %edi
	0xbe, 2, 0, 0, 0, 0xba, 1, 0, 0, 0, 0x0f, 0x05, // mov $F_SETFD, %esi; mov $FD_CLOEXEC, %edx; syscall
	0x48, 0x8b, 0x7c, 0x24, 0x10, // mov 16(%rsp), %rdi (argv[1])
	0x48, 0x8d, 0x74, 0x24, 0x18, // lea 24(%rsp), %rsi (argv from 2 on)
	0x48, 0x8b, 0x0c, 0x24, // mov (%rsp), %rcx (argc)
	0x48, 0x8d, 0x54, 0xcc, 0x10, // lea 16(%rsp, %rcx, 8), %rdx (envp)
	0xb8, 59, 0, 0, 0, 0x0f, 0x05, // mov $SYS_execve, %eax; syscall
	0xf7, 0xd8, 0x50, // neg %eax; push %rax
	0xb8, 1, 0, 0, 0, 0xbf, starterStatus, 0, 0, 0, // mov $SYS_write, %eax; mov $starterStatus, %edi
	0x48, 0x89, 0xe6, 0xba, 4, 0, 0, 0, 0x0f, 0x05, // mov %rsp, %rsi; mov $4, %edx; syscall
	0xb8, 60, 0, 0, 0, 0xbf, 126, 0, 0, 0, 0x0f, 0x05, // mov $SYS_exit, %eax; mov $126, %edi; syscall
}

// starterImage returns the starter as an ELF file.
func starterImage() []byte {
	const base, code = 0x400000, 0x78
	b := make([]byte, code+len(starterCode))
	le := binary.LittleEndian
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)         // ET_EXEC
	le.PutUint16(b[18:], 62)        // EM_X86_64
	le.PutUint32(b[20:], 1)         // version
	le.PutUint64(b[24:], base+code) // entry
	le.PutUint64(b[32:], 64)        // program headers
	le.PutUint16(b[52:], 64)        // size of this header
	le.PutUint16(b[54:], 56)        // size of a program header
	le.PutUint16(b[56:], 1)         // number of program headers
	le.PutUint32(b[64:], 1)         // PT_LOAD
	le.PutUint32(b[68:], 5)         // readable, executable
	le.PutUint64(b[80:], base)
	le.PutUint64(b[88:], base)
	le.PutUint64(b[96:], uint64(len(b)))
	le.PutUint64(b[104:], uint64(len(b)))
	le.PutUint64(b[112:], 4096)
	copy(b[code:], starterCode[:])
	return b
}

package extract

import (
	"bytes"
	"image"
	"image/jpeg"
	"image/png"
	"testing"
)

func TestSniff(t *testing.T) {
	var pic, photo bytes.Buffer
	if err := png.Encode(&pic, image.NewGray(image.Rect(0, 0, 2, 2))); err != nil {
		t.Fatal(err)
	}
	if err := jpeg.Encode(&photo, image.NewGray(image.Rect(0, 0, 2, 2)), nil); err != nil {
		t.Fatal(err)
	}
	archive := zipped(t, "")
	for _, tt := range []struct{ name, data, want string }{
		{"nothing", "", TypeEmpty},
		{"a table", "id,name\n1,Anna\n", TypeText},
		{"an ELF program", "\x7fELF\x02\x01\x01", TypeProgram},
		{"a Windows program", "MZ\x90\x00\x03", TypeProgram},
		{"a text that begins like one", "MZ is a code\n", TypeText},
		{"WebAssembly", "\x00asm\x01\x00\x00\x00", TypeProgram},
		{"Python bytecode", "\xcb\x0d\r\n\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xe3", TypeProgram},
		{"a script", "#!/bin/sh\necho", TypeScript},
		{"a script with a byte order mark", "\xef\xbb\xbf#!/usr/bin/env python3\n", TypeScript},
		{"JSON", " {\"a\": [1]}\n", TypeJSON},
		{"almost JSON", "{\"a\": [1]\n", TypeText},
		{"a page", "\n<!DOCTYPE html><p>x", TypeHTML},
		{"a picture", pic.String(), TypePNG},
		{"a photo", photo.String(), TypeJPEG},
		{"a picture with an archive behind it", pic.String() + string(archive), TypeBinary},
		{"a photo with a program behind it", photo.String() + "\x7fELF", TypeBinary},
		{"a truncated picture", pic.String()[:20], TypeBinary},
		{"a text with a program behind it", "id,name\n\x7fELF\x02\x00", TypeBinary},
		{"a text with escape sequences", "a\x1b[2Jb", TypeBinary},
		{"not UTF-8", "caf\xe9 au lait", TypeBinary},
		{"an archive", string(archive), TypeZIP},
		{"a packed file", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", TypePacked},
		{"parquet", "PAR1........PAR1", TypeParquet},
		{"truncated parquet", "PAR1............", TypeBinary},
		{"PDF", "%PDF-1.7\n", TypePDF},
	} {
		if got := Sniff([]byte(tt.data)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func FuzzSniff(f *testing.F) {
	f.Add([]byte("a,b\n1,2\n"))
	f.Add([]byte("\x89PNG\r\n\x1a\n"))
	f.Add([]byte("PAR1"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if got := Sniff(data); got == "" {
			t.Error("no type")
		}
	})
}

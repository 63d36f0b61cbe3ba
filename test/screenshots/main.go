// Command screenshots makes the pictures that the browser's test took small
// enough to be kept in docs: it reads the PNG files of one folder and writes
// them to another with a palette of 256 colours, of which a page of text has
// few more. It fails if one is still larger than 100 kB.
//
//	go run ./test/screenshots FROM TO
package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

const maxSize = 100_000 // bytes

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 3 {
		return errors.New("usage: screenshots FROM TO")
	}
	names, err := filepath.Glob(filepath.Join(os.Args[1], "*.png"))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("no picture in %s: %w", os.Args[1], err)
	}
	if err := os.MkdirAll(os.Args[2], 0o750); err != nil {
		return err
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if b, err = shrink(b); err != nil {
			return fmt.Errorf("shrink %s: %w", name, err)
		}
		if len(b) > maxSize {
			return fmt.Errorf("%s has %d bytes, more than %d", name, len(b), maxSize)
		}
		if err := os.WriteFile(filepath.Join(os.Args[2], filepath.Base(name)), b, 0o644); err != nil { //nolint:gosec // a picture for everybody
			return err
		}
	}
	return nil
}

// shrink writes a picture in the 256 colours that it has most of.
func shrink(b []byte) ([]byte, error) {
	img, err := png.Decode(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	count := map[color.Color]int{}
	r := img.Bounds()
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for x := r.Min.X; x < r.Max.X; x++ {
			count[color.RGBAModel.Convert(img.At(x, y))]++
		}
	}
	most := slices.SortedFunc(maps.Keys(count), func(a, b color.Color) int {
		return cmp.Or(count[b]-count[a], cmp.Compare(fmt.Sprint(a), fmt.Sprint(b))) // the same each time
	})
	out := image.NewPaletted(r, color.Palette(most[:min(len(most), 256)]))
	place := map[color.Color]uint8{}
	for c := range count {
		place[c] = uint8(out.Palette.Index(c)) // at most 255
	}
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for x := r.Min.X; x < r.Max.X; x++ {
			out.SetColorIndex(x, y, place[color.RGBAModel.Convert(img.At(x, y))])
		}
	}
	var w bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&w, out)
	return w.Bytes(), err
}

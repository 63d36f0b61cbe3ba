package preview

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/gif"
	"image/jpeg"
	"image/png"
	"io"

	"golang.org/x/image/webp"
)

// The limits of a picture. Its pixels take four to eight bytes each while it is drawn.
const (
	maxPixels = 16 << 20
	maxSide   = 16 << 10 // pixels
	// ShownSide is the longer side of a picture as [Redraw] returns it, in pixels.
	ShownSide = 1400
)

// An Image describes a picture. [Redraw] returns its pixels.
type Image struct {
	Format        string // "PNG", "JPEG", "GIF" or "WebP"
	Width, Height int    // pixels, after Exif orientation
}

// Smaller reports whether the picture is shown smaller than it is.
func (i Image) Smaller() bool { return max(i.Width, i.Height) > ShownSide }

// ErrPicture means that the data is not a picture that [Redraw] can decode.
var ErrPicture = errors.New("not a picture that the console can show")

// isWebP reports whether data begins as WebP does.
func isWebP(data []byte) bool {
	return len(data) > 16 && string(data[:4]) == "RIFF" && string(data[8:12]) == "WEBP"
}

// codec returns the decoder for data, by its content. It does not use the registry of
// package image, to which any imported package can add decoders.
func codec(data []byte) (format string, config func(io.Reader) (image.Config, error), decode func(io.Reader) (image.Image, error)) {
	switch {
	case bytes.HasPrefix(data, []byte("\x89PNG\r\n\x1a\n")):
		return "PNG", png.DecodeConfig, png.Decode
	case bytes.HasPrefix(data, []byte("\xff\xd8\xff")):
		return "JPEG", jpeg.DecodeConfig, jpeg.Decode
	case bytes.HasPrefix(data, []byte("GIF87a")), bytes.HasPrefix(data, []byte("GIF89a")):
		return "GIF", gif.DecodeConfig, gif.Decode
	case isWebP(data):
		return "WebP", webp.DecodeConfig, webp.Decode
	}
	return "", nil, nil
}

// measure returns format and size that a picture claims, or an error if it is too large.
// The attack: a file of a few bytes that claims a billion pixels.
func measure(data []byte) (Image, error) {
	format, config, _ := codec(data)
	if config == nil {
		return Image{}, ErrPicture
	}
	c, err := config(bytes.NewReader(data))
	if err != nil {
		return Image{}, fmt.Errorf("%w: %v", ErrPicture, err) //nolint:errorlint // a decoder's words, for people
	}
	if c.Width < 1 || c.Height < 1 || c.Width > maxSide || c.Height > maxSide || c.Width*c.Height > maxPixels {
		return Image{}, fmt.Errorf("%w: it has %d × %d pixels", ErrPicture, c.Width, c.Height)
	}
	i := Image{Format: format, Width: c.Width, Height: c.Height}
	if turn := orientation(data); turn >= 5 {
		i.Width, i.Height = i.Height, i.Width
	}
	return i, nil
}

// picture describes a picture.
func (f *File) picture(data []byte) {
	i, err := measure(data)
	if err != nil {
		f.missing("the picture is not shown: %v", err)
		return
	}
	f.Form, f.Drawing = Picture, i
	f.Facts = fmt.Sprintf("%s, %d × %d pixels", i.Format, i.Width, i.Height)
	if n := frames(data); n > 1 {
		f.missing("it is an animation of %d pictures, and only the first is shown", n)
	}
	if i.Smaller() {
		f.missing("it is shown smaller than it is")
	}
	if gps(data) {
		f.note("it contains the place where it was taken, which is sent with it")
	}
	if n := beside(data); n > 0 {
		f.missing("it contains %s that are not pixels, and that are sent with it", plural(n, "byte", "bytes"))
	}
}

// Redraw decodes a picture and encodes its pixels as a new PNG file, so that nothing else
// of the file reaches a browser's decoder. The new picture is upright, its longer side has
// at most side pixels, and a grey pattern shows through transparent pixels. Redraw returns
// an error that wraps [ErrPicture] if the data is no such picture, and ends at the
// decoder's next read after ctx is done.
func Redraw(ctx context.Context, data []byte, side int) ([]byte, error) {
	if len(data) > maxRead {
		return nil, fmt.Errorf("%w: the file is too large", ErrPicture)
	}
	if _, err := measure(data); err != nil {
		return nil, err
	}
	_, _, decode := codec(data)
	// The attack: a progressive JPEG with a hundred thousand scans over all its pixels.
	src, err := decode(patience{ctx, bytes.NewReader(data)})
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrPicture, err) //nolint:errorlint // as above
	}
	b := src.Bounds()
	if b.Empty() || b.Dx()*b.Dy() > maxPixels {
		return nil, fmt.Errorf("%w: it has other pixels than it said", ErrPicture)
	}
	flat := image.NewRGBA(image.Rect(0, 0, b.Dx(), b.Dy()))
	draw.Draw(flat, flat.Bounds(), pattern{}, image.Point{}, draw.Src)
	draw.Draw(flat, flat.Bounds(), src, b.Min, draw.Over)
	flat = turned(shrunk(flat, side), orientation(data))
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&out, flat); err != nil {
		return nil, fmt.Errorf("draw picture: %w", err)
	}
	return out.Bytes(), ctx.Err()
}

// patience is a reader that fails when its context is done.
type patience struct {
	ctx context.Context //nolint:containedctx // a reader for one call, which has it
	r   io.Reader
}

func (p patience) Read(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	return p.r.Read(b)
}

// pattern is the background of transparent pictures. White letters are as readable on it
// as black ones.
type pattern struct{}

func (pattern) ColorModel() color.Model { return color.RGBAModel }
func (pattern) Bounds() image.Rectangle { return image.Rect(0, 0, maxSide, maxSide) }
func (pattern) At(x, y int) color.Color {
	if (x>>3+y>>3)&1 == 0 {
		return color.RGBA{0xb8, 0xb8, 0xb8, 0xff}
	}
	return color.RGBA{0xa4, 0xa4, 0xa4, 0xff}
}

// shrunk returns a picture whose longer side has at most side pixels, each of them the
// mean of those that it stands for.
func shrunk(src *image.RGBA, side int) *image.RGBA {
	w, h := src.Rect.Dx(), src.Rect.Dy()
	long := max(w, h)
	if side < 1 || long <= side {
		return src
	}
	nw, nh := max(1, w*side/long), max(1, h*side/long)
	out := image.NewRGBA(image.Rect(0, 0, nw, nh))
	for y := range nh {
		y0, y1 := y*h/nh, max((y+1)*h/nh, y*h/nh+1)
		for x := range nw {
			x0, x1 := x*w/nw, max((x+1)*w/nw, x*w/nw+1)
			var sum [4]int
			for sy := y0; sy < y1; sy++ {
				row := src.Pix[sy*src.Stride+4*x0 : sy*src.Stride+4*x1]
				for i := 0; i < len(row); i += 4 {
					sum[0] += int(row[i])
					sum[1] += int(row[i+1])
					sum[2] += int(row[i+2])
					sum[3] += int(row[i+3])
				}
			}
			n := (y1 - y0) * (x1 - x0)
			p := out.Pix[y*out.Stride+4*x:]
			for i := range sum {
				p[i] = byte(sum[i] / n)
			}
		}
	}
	return out
}

// turned returns a picture upright, where turn is an orientation of Exif, 1 to 8.
func turned(src *image.RGBA, turn int) *image.RGBA {
	if turn < 2 || turn > 8 {
		return src
	}
	w, h := src.Rect.Dx(), src.Rect.Dy()
	out := image.NewRGBA(image.Rect(0, 0, w, h))
	if turn >= 5 {
		out = image.NewRGBA(image.Rect(0, 0, h, w))
	}
	for y := range h {
		for x := range w {
			nx, ny := x, y
			switch turn {
			case 2:
				nx = w - 1 - x
			case 3:
				nx, ny = w-1-x, h-1-y
			case 4:
				ny = h - 1 - y
			case 5:
				nx, ny = y, x
			case 6:
				nx, ny = h-1-y, x
			case 7:
				nx, ny = h-1-y, w-1-x
			case 8:
				nx, ny = y, w-1-x
			}
			copy(out.Pix[ny*out.Stride+4*nx:][:4], src.Pix[y*src.Stride+4*x:][:4])
		}
	}
	return out
}

// frames returns the number of pictures of an animation, or 1.
func frames(data []byte) int {
	switch {
	case bytes.HasPrefix(data, []byte("GIF8")):
		return gifFrames(data)
	case bytes.HasPrefix(data, []byte("\x89PNG")):
		for kind, body := range pngChunks(data) {
			if kind == "acTL" && len(body) >= 4 {
				return int(min(binary.BigEndian.Uint32(body), 1<<16))
			}
		}
	case isWebP(data):
		return bytes.Count(data, []byte("ANMF"))
	}
	return 1
}

// pngChunks are the chunks of a PNG file in turn, as far as they are whole.
func pngChunks(data []byte) func(yield func(kind string, body []byte) bool) {
	return func(yield func(string, []byte) bool) {
		for at := 8; at+12 <= len(data); {
			n := int(binary.BigEndian.Uint32(data[at:]))
			if n > len(data)-at-12 || !yield(string(data[at+4:at+8]), data[at+8:at+8+n]) {
				return
			}
			at += 12 + n
		}
	}
}

// gifFrames counts the pictures of a GIF file.
func gifFrames(data []byte) (n int) {
	table := func(flags byte) int {
		if flags&0x80 == 0 {
			return 0
		}
		return 3 << (flags&7 + 1)
	}
	if len(data) < 13 {
		return 0
	}
	at := 13 + table(data[10])
	blocks := func() { // sub-blocks, the last of which is empty
		for at < len(data) && data[at] != 0 {
			at += 1 + int(data[at])
		}
		at++
	}
	for at < len(data) {
		switch data[at] {
		case 0x21:
			at += 2
			blocks()
		case 0x2c:
			if n++; at+10 > len(data) {
				return n
			}
			at += 11 + table(data[at+9])
			blocks()
		default:
			return n
		}
	}
	return n
}

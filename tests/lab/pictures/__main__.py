"""Write the pictures into docs/images."""

from . import gallery

for name, text in gallery.files().items():
    (gallery.IMAGES / name).write_text(text)
    print(name)

"""Visit the shop as a program: log in, look, press buttons."""

import json
from dataclasses import dataclass
from http.client import HTTPMessage
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, Request, build_opener

TIMEOUT = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the shop."""

    status: int
    headers: HTTPMessage
    text: str

    def json(self) -> Any:
        """
        Return the data of the response.

        Raises:
            ConnectionError: The response is not for programs, for example an error page.
        """
        try:
            return json.loads(self.text)
        except ValueError:
            raise ConnectionError(f"The shop answered {self.status}: {self.text[:200]}") from None


class Visitor:
    """
    A visitor with cookies.

    Args:
        url: The address of the shop, with a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self._cookies))

    def log_in(self, name: str, password: str) -> "Visitor":
        """Log in as a customer or as staff."""
        self.get("login/")
        answer = self.post("login/", username=name, password=password)
        if not self._cookie("sessionid"):
            raise ConnectionError(f"{name} could not log in: {answer.status}")
        return self

    def get(self, path: str = "") -> Answer:
        """Get a page, or the data of one."""
        return self._send(Request(self._url + path))

    def post(self, path: str, **fields: str) -> Answer:
        """Press a button."""
        request = Request(self._url + path, data=urlencode(fields).encode())
        request.add_header("X-CSRFToken", self._cookie("csrftoken"))
        return self._send(request)

    def _send(self, request: Request) -> Answer:
        request.add_header("Accept", "application/json")
        try:
            response = self._opener.open(request, timeout=TIMEOUT)
        except HTTPError as error:
            response = error  # a response like any other
        with response:
            return Answer(response.status, response.headers, response.read().decode())

    def _cookie(self, name: str) -> str:
        return next((cookie.value or "" for cookie in self._cookies if cookie.name == name), "")

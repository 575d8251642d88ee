"""The driver of MySQL and MariaDB for the tests: PyMySQL, which needs no compiler and no headers."""


def install_mysql() -> None:
    """Let Django take PyMySQL for mysqlclient, whose version it asks for."""
    import pymysql

    pymysql.version_info = (2, 2, 8, "final", 0)  # type: ignore[assignment]
    pymysql.install_as_MySQLdb()
